"""The objectives against closed forms: orders, limits, collapse, counts, shared dropout, accumulation."""

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import Exact, NoNetwork, finite_denoiser, gaussian_consistency, gaussian_denoiser
from torch import Tensor, nn

from tcm import (
    Batch,
    Classes,
    Consistency,
    Curriculum,
    DDPMppConfig,
    Denoiser,
    Diffusion,
    Distillation,
    EDM2Config,
    Labels,
    LogNormal,
    LogStudentT,
    Pairs,
    PseudoHuber,
    SampleStreams,
    SquaredL2,
    TruncatedConsistency,
    Uncertainty,
)
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition
from tcm.method.curriculum import SMALLEST_R
from tcm.method.distances import uniform
from tcm.method.objectives import Draw, Objective, Tangents, draw, f_trunc
from tcm.method.preconditioning import Masks, c_out
from tcm.method.solvers import euler, heun

S = 0.5
SHAPE = (1, 4, 4)
STAGE_2 = TruncatedConsistency(LogStudentT(0, 0.2, low=1.0))


def proportional(fraction: float) -> Curriculum:
    """Δ_t = fraction · t."""
    return Curriculum(d=0, limit=1 - fraction, k=0)


def distillation_loss(step, fraction: float) -> float:
    """The 1/Δ-weighted, unsquared distance of the exact f to itself, one solver step away, on Gaussian data."""
    pairs = Pairs(proportional(fraction), PseudoHuber(1e-13), distillation=Distillation(step))
    models = {"student": Exact(gaussian_consistency(S), SHAPE), "teacher": Exact(gaussian_denoiser(S), SHAPE)}
    generator = torch.Generator().manual_seed(1)
    x = S * torch.randn(32, *SHAPE, generator=generator, dtype=torch.float64)
    eps = torch.randn(32, *SHAPE, generator=generator, dtype=torch.float64)
    t = LogNormal(-1.1, 2.0, low=0.02).sample(32, generator)
    return float(Consistency(pairs=pairs).loss_at(models, Batch.whole(x), 0, Draw(t, eps, None, None)).total.detach())


@pytest.mark.parametrize(("step", "order"), [(euler, 1), (heun, 2)])
def test_distillation_of_the_exact_function_vanishes_at_the_solvers_order(step, order: int) -> None:
    fractions = np.geomspace(0.03, 0.0003, 7)
    losses = [distillation_loss(step, fraction) for fraction in fractions]
    slope = np.polyfit(np.log(fractions), np.log(losses), 1)[0]
    assert slope == pytest.approx(order, abs=0.05)


class Quadratic(nn.Module):
    """f_θ(x, t) = θ₀ x/(1 + t²) + θ₁ t x²: not a consistency function, so that its gradient does not vanish."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.8, 0.3], dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        return self.theta[0] * x / (1 + t**2) + self.theta[1] * t * x**2


def expected_gradient(fraction: float, distillation: Distillation | None) -> Tensor:
    """The exact expectation over x ~ N(0, S²) and ε ~ N(0, 1): a cubature that is exact for the degree 4 at hand."""
    nodes = torch.tensor([-(3**0.5), 0, 0, 0, 0, 3**0.5], dtype=torch.float64)  # Gauss-Hermite: weights 1 : 4 : 1
    x, eps = (grid.reshape(-1, 1, 1, 1) for grid in torch.meshgrid(S * nodes, nodes, indexing="ij"))
    f = Exact(Quadratic(), (1, 1, 1))
    models = {"student": f, "teacher": Exact(gaussian_denoiser(S), (1, 1, 1))}
    pairs = Pairs(proportional(fraction), SquaredL2(), distillation=distillation)
    draw = Draw(torch.full((len(x),), 0.7, dtype=torch.float64), eps, None, None)
    Consistency(pairs=pairs).loss_at(models, Batch.whole(x), 0, draw).total.backward()
    return f.function.theta.grad


def test_gradient_of_training_is_that_of_distillation_in_the_limit() -> None:
    """TCM App. D: the gradients differ by O(Δ), and their common limit is not zero."""
    fractions = np.geomspace(0.1, 0.0001, 7)
    differences = [
        float((expected_gradient(fraction, None) - expected_gradient(fraction, Distillation(euler))).norm())
        for fraction in fractions
    ]
    assert np.polyfit(np.log(fractions), np.log(differences), 1)[0] == pytest.approx(1, abs=0.05)
    assert float(expected_gradient(fractions[-1], None).norm()) > 1000 * differences[-1]


def test_teachers_guidance_enters_the_pair() -> None:
    points, point_labels = torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1), torch.tensor([0, 1])
    teacher = Exact(finite_denoiser(points, point_labels), (1, 1, 1))
    t, r = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    x_t, label = torch.tensor([0.3], dtype=torch.float64).reshape(1, 1, 1, 1), Labels(torch.tensor([1]))
    models, draw = {"student": teacher, "teacher": teacher}, Draw(t, x_t, None, label)
    pairs = Pairs(distillation=Distillation(euler, guidance=3.0))
    x_r = pairs.earlier(models, Batch.whole(x_t, label), draw, x_t, r)
    without_class = np.tanh(0.3)  # two points at ±1 and t = 1
    D = without_class + 3 * (1 - without_class)
    assert float(x_r.detach()) == pytest.approx(0.3 + (0.5 - 1) * (0.3 - D), rel=1e-9)


def test_distillation_without_a_teacher_is_an_error() -> None:
    f = Exact(gaussian_consistency(S), SHAPE)
    with pytest.raises(TcmError, match=r"distillation needs models\['teacher'\]"):
        Consistency(pairs=Pairs(distillation=Distillation())).loss(
            {"student": f}, Batch.whole(torch.zeros(2, *SHAPE)), 0, SampleStreams([0, 1])
        )


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_a_constant_minimises_the_truncated_loss_without_the_boundary_and_not_with_it(value: float) -> None:
    """TCM Sec. 3, "Naive solution": the collapse that the boundary loss prevents."""
    constant = Exact(lambda x, t, labels: value + 0 * x, SHAPE, t_min=1.0)
    frozen = Exact(gaussian_consistency(S), SHAPE)
    batch = Batch.whole(S * SampleStreams(range(100, 132)).normal(SHAPE))
    naive = Consistency(STAGE_2.times, STAGE_2.pairs).loss({"student": constant}, batch, 0, SampleStreams(range(32)))
    assert float(naive.total.detach()) == 0
    # Stage 2 with its boundary samples taken out, and no others whose target is the frozen model's.
    far = TruncatedConsistency(LogStudentT(0, 0.2, low=1.1), STAGE_2.pairs, w_b=0.0)
    assert (
        float(far.loss({"student": constant, "frozen": frozen}, batch, 0, SampleStreams(range(32))).total.detach()) == 0
    )

    collapsed = STAGE_2.loss({"student": constant, "frozen": frozen}, batch, 0, SampleStreams(range(32)))
    exact = STAGE_2.loss({"student": frozen, "frozen": frozen}, batch, 0, SampleStreams(range(32)))
    assert float(collapsed.parts["boundary"]) > 10 * float(exact.parts["boundary"])
    assert float(collapsed.total.detach()) > 3 * float(exact.total.detach())


def test_training_leaves_the_constant_only_with_the_boundary() -> None:
    """Gradient descent from f = 0 stays there without the boundary loss, and moves towards the data with it."""
    grown = {}
    for w_b in (0.0, 1.0):
        f = Exact(gaussian_consistency(S), SHAPE, t_min=1.0)
        nn.init.zeros_(f.gain)
        objective = TruncatedConsistency(LogStudentT(0, 0.2, low=1.1), Pairs(Curriculum(d=0, limit=0.99)), w_b=w_b)
        optimiser = torch.optim.SGD(f.parameters(), lr=3e-4)
        for step in range(50):
            batch = Batch.whole(S * SampleStreams(range(9000, 9016)).normal(SHAPE))
            streams = SampleStreams(range(16 * step, 16 * step + 16))
            losses = objective.loss(
                {"student": f, "frozen": Exact(gaussian_consistency(S), SHAPE)}, batch, step, streams
            )
            optimiser.zero_grad()
            losses.total.backward()
            optimiser.step()
        grown[w_b] = float(f.gain.detach())
    assert grown[0.0] == 0
    assert grown[1.0] > 0.5


class Recorder(NoNetwork):
    """Notes what each call got: rows, whether with gradient, c_noise and masks."""

    dropout, dropout_shapes = 0.5, ((3, 2, 2),)

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.calls: list[tuple[bool, Tensor, Masks | None]] = []

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        self.calls.append((torch.is_grad_enabled(), c_noise, masks))
        return self.gain * x

    def rows(self, with_gradient: bool) -> int:
        return sum(len(c_noise) for gradient, c_noise, _ in self.calls if gradient == with_gradient)


@given(
    count=st.integers(2, 40),
    rho=st.floats(0.01, 0.99),
    fraction=st.sampled_from([0.001, 0.3, 0.9]),
    t_prime=st.sampled_from([0.01, 1.0, 79.0]),
    seed=st.integers(0, 2**31),
)
def test_a_truncated_step_evaluates_b_rows_with_gradient_and_b_without(count, rho, fraction, t_prime, seed) -> None:
    N_B = int(count * rho)
    if not 0 < N_B < count:
        return
    times = LogStudentT(0, 0.2, low=t_prime)
    objective = TruncatedConsistency(times, Pairs(proportional(fraction)), t_prime, rho=rho)
    student, frozen = Recorder(), Recorder()
    models = {"student": Denoiser(student, SHAPE), "frozen": Denoiser(frozen, SHAPE, t_min=1e-6)}
    batch = Batch.whole(torch.zeros(count, *SHAPE))
    losses = objective.loss(models, batch, 0, SampleStreams(range(seed, seed + count)))
    assert student.rows(with_gradient=True) == count
    assert frozen.rows(with_gradient=True) == 0
    early = (losses.t - objective.pairs.curriculum.delta(losses.t, 0)) < t_prime
    assert frozen.rows(with_gradient=False) == int(early.sum()) >= N_B
    assert student.rows(with_gradient=False) == count - int(early.sum())
    assert int((losses.t == t_prime).sum()) == N_B == int(objective.is_boundary(batch).sum())


def test_every_sample_has_one_mask_in_student_and_target() -> None:
    student, frozen = Recorder(), Recorder()
    models = {"student": Denoiser(student, SHAPE), "frozen": Denoiser(frozen, SHAPE)}
    batch = Batch.whole(torch.zeros(64, *SHAPE))
    objective = TruncatedConsistency(STAGE_2.times, Pairs(proportional(0.1)))
    draw = objective.draw(models, batch, 0, SampleStreams(range(64)))
    objective.loss_at(models, batch, 0, draw)
    r = draw.t - objective.pairs.curriculum.delta(draw.t, 0)
    for network, gradient, rows, time in (
        (student, True, torch.ones(64, dtype=torch.bool), draw.t),
        (student, False, r >= 1, r),
        (frozen, False, r < 1, r),
    ):
        (call,) = [call for call in network.calls if call[0] == gradient]
        torch.testing.assert_close(call[1], (time[rows].log() / 4).float())
        assert len(call[1]) > 0
        assert torch.equal(call[2][0], draw.masks[0][rows])


def networks() -> list[DDPMppConfig | EDM2Config]:
    return [
        DDPMppConfig(channels=8, channel_mult=(1, 2), blocks=1, attention=(4,), dropout=0.3),
        EDM2Config(channels=64, channel_mult=(1, 1), blocks=1, attention=(4,), dropout=0.3, dropout_up_to=4),
    ]


def lively(config: DDPMppConfig | EDM2Config, condition: Classes | None = None) -> Denoiser:
    """A denoiser whose layers all matter: none starts near zero."""
    denoiser = Denoiser(config.build((1, 8, 8), condition), (1, 8, 8), condition)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return denoiser


@pytest.mark.parametrize("config", networks(), ids=lambda config: config.kind)
def test_masks_belong_to_a_sample_and_not_to_its_batch(config) -> None:
    network = lively(config).network
    seeds = list(range(10))
    all_masks = network.draw_masks(SampleStreams(seeds))
    assert [tuple(mask.shape[1:]) for mask in all_masks] == list(network.dropout_shapes)
    for chosen in ([7], [9, 0, 4], seeds[::-1]):
        for some, whole in zip(network.draw_masks(SampleStreams(chosen)), all_masks, strict=True):
            assert torch.equal(some, whole[chosen])


@pytest.mark.parametrize("config", networks(), ids=lambda config: config.kind)
def test_shared_masks_make_neighbours_agree(config) -> None:
    """With Δ → 0 student and target are one function: only different masks could tell them apart."""
    f = lively(config)
    models = {"student": f, "frozen": deepcopy(f)}
    pairs = Pairs(Curriculum(d=0, limit=1 - 1e-6), SquaredL2(), uniform)
    objective = TruncatedConsistency(STAGE_2.times, pairs)
    batch = Batch.whole(torch.rand(16, 1, 8, 8) * 2 - 1)
    draw = objective.draw(models, batch, 0, SampleStreams(range(16)))
    shared = objective.loss_at(models, batch, 0, draw).weighted
    x_t, others = batch.x + draw.t[:, None, None, None].float() * draw.eps, SampleStreams(range(50, 66))
    with torch.no_grad():
        other = f(x_t, draw.t, None, f.network.draw_masks(others)) - f(x_t, draw.t, None, draw.masks)
    independent = other.flatten(1).square().sum(1)
    assert bool((shared < 1e-4 * independent).all())


@pytest.mark.parametrize("config", networks(), ids=lambda config: config.kind)
@pytest.mark.parametrize(
    "objective",
    [Diffusion(label_dropout=0.5), Consistency(), TruncatedConsistency(STAGE_2.times, Pairs(proportional(0.1)))],
    ids=lambda objective: type(objective).__name__,
)
def test_micro_batches_add_up_to_the_batch(objective: Objective, config) -> None:
    f, frozen = lively(config, Classes(3)), lively(config, Classes(3))
    models = {"student": f, "frozen": frozen}
    x, labels = torch.rand(12, 1, 8, 8) * 2 - 1, Labels(torch.arange(12) % 3)

    def accumulate(shares: list[list[int]]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        f.zero_grad()
        total, parts = torch.zeros(()), {}
        for share in shares:
            index = torch.tensor(share)
            batch = Batch(x[index], labels.select(index), index, 12)
            losses = objective.loss(models, batch, 3, SampleStreams([1000 + i for i in share]))
            losses.total.backward()
            total = total + losses.total.detach()
            parts = {name: parts.get(name, 0) + value for name, value in losses.parts.items()}
        return total, torch.cat([p.grad.flatten() for p in f.parameters()]), parts

    total, gradient, parts = accumulate([list(range(12))])
    for shares in ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], [[11, 2, 5], [0], [1, 3, 4, 6, 7, 8, 9, 10]]):
        total_2, gradient_2, parts_2 = accumulate(shares)
        torch.testing.assert_close(total_2, total, rtol=1e-5, atol=0)
        torch.testing.assert_close(parts_2, parts, rtol=1e-5, atol=0)
        assert float((gradient - gradient_2).norm()) < 1e-4 * float(gradient.norm())


def test_no_global_generator_is_touched() -> None:
    f = lively(networks()[0], Classes(2))
    models = {"student": f, "frozen": deepcopy(f), "teacher": deepcopy(f)}
    batch = Batch.whole(torch.rand(8, 1, 8, 8), Labels(torch.arange(8) % 2))
    before = torch.get_rng_state()
    for objective in (
        Diffusion(label_dropout=0.3),
        Consistency(),
        Consistency(pairs=Pairs(distillation=Distillation(guidance=2.0))),
        STAGE_2,
    ):
        objective.loss(models, batch, 0, SampleStreams(range(8))).total.backward()
    assert torch.equal(torch.get_rng_state(), before)


class Dropping(NoNetwork):
    """The smallest network with dropout, for a real compiler."""

    dropout, dropout_shapes = 0.5, (SHAPE,)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SHAPE))

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        h = torch.tanh(self.weight * x + c_noise[:, None, None, None])
        return h if masks is None else h * masks[0] * 2


def compare_compiled(f: Denoiser, backend: str, x: Tensor) -> None:
    """Loss and gradient of a truncated step, with dropout, as they are without the compiler."""
    objective = TruncatedConsistency(STAGE_2.times, Pairs(proportional(0.2)))
    results = []
    for compiled in (False, True):
        student, frozen = deepcopy(f), deepcopy(f)
        if compiled:
            student.network.compile(backend=backend, fullgraph=True)
        before = torch.get_rng_state()
        losses = objective.loss({"student": student, "frozen": frozen}, Batch.whole(x), 0, SampleStreams(range(len(x))))
        losses.total.backward()
        assert torch.equal(torch.get_rng_state(), before)
        results.append((losses.weighted, [p.grad for p in student.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_compiled_by_inductor_the_masks_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor's cache would give back vector code to a process that may not use it: its key lacks the instruction set.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backend = "inductor" if shutil.which("g++") else "eager"
    compare_compiled(Denoiser(Dropping(), SHAPE), backend, torch.rand(8, *SHAPE))


@pytest.mark.slow
@pytest.mark.parametrize("config", networks(), ids=lambda config: config.kind)
def test_networks_compile_as_one_graph(config) -> None:
    torch._dynamo.reset()
    compare_compiled(lively(config), "eager", torch.rand(8, 1, 8, 8))


@pytest.mark.parametrize("config", networks(), ids=lambda config: config.kind)
def test_autocast_keeps_the_gradient(config) -> None:
    """A target pass without gradient comes first: the weights that autocast caches there must not lose it."""
    f = lively(config)
    gradients = []
    for enabled in (False, True):
        f.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            batch = Batch.whole(torch.zeros(16, 1, 8, 8))
            losses = Consistency(pairs=Pairs(proportional(0.5))).loss(
                {"student": f}, batch, 0, SampleStreams(range(16))
            )
        assert losses.total.dtype == torch.float32
        losses.total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in f.parameters()]))
    assert float(torch.cosine_similarity(*gradients, dim=0)) > 0.99


def test_diffusion_loss_of_the_ideal_denoiser() -> None:
    """E‖D(x_t) − x‖² = s²t²/(s² + t²) per pixel, which is c_out² where σ_data = s: the weighted loss is 1."""
    f = Exact(gaussian_denoiser(S), (1, 16, 16))
    x = S * SampleStreams(range(1000, 1256)).normal((1, 16, 16))
    losses = Diffusion().loss({"student": f}, Batch.whole(x), 0, SampleStreams(range(256)))
    assert float(losses.total.detach()) == pytest.approx(1, abs=0.02)
    worse = Exact(gaussian_denoiser(0.7 * S), (1, 16, 16))
    assert (
        float(Diffusion().loss({"student": worse}, Batch.whole(x), 0, SampleStreams(range(256))).total.detach()) > 1.02
    )


def test_learned_uncertainty_divides_the_loss_and_is_added_to_it() -> None:
    f = Exact(gaussian_denoiser(S), SHAPE)
    f.uncertainty = Uncertainty(16)
    batch, streams = Batch.whole(torch.zeros(4, *SHAPE)), SampleStreams(range(4))
    draw = Diffusion().draw({"student": f}, batch, 0, streams)
    losses = Diffusion().loss_at({"student": f}, batch, 0, draw)
    x_t = draw.t.float()[:, None, None, None] * draw.eps
    plain = f(x_t, draw.t).square().mean((1, 2, 3)) / c_out(draw.t, 0.5).float() ** 2
    u = f.uncertainty(draw.t.log().float() / 4)
    torch.testing.assert_close(losses.weighted, (plain / u.exp() + u).detach())
    torch.testing.assert_close(losses.parts["denoising"], plain.mean().detach())
    losses.total.backward()
    assert float(f.uncertainty.weight.grad.norm()) > 0


DROPPING = (Diffusion(), Consistency(), STAGE_2, Consistency(pairs=Tangents()))


@pytest.mark.parametrize("objective", DROPPING, ids=["diffusion", "consistency", "truncated", "tangents"])
def test_label_dropout_takes_the_stated_share_of_labels_away(objective: Objective) -> None:
    before = torch.arange(2000) % 7
    batch = Batch.whole(torch.zeros(2000, 1, 1, 1), Labels(before))
    models = {"student": Exact(gaussian_denoiser(S), (1, 1, 1))}
    whole = objective.draw(models, batch, 0, SampleStreams(range(2000)))
    drawn = replace(objective, label_dropout=0.3).draw(models, batch, 0, SampleStreams(range(2000)))
    gone = drawn.condition.index == -1
    assert float(gone.float().mean()) == pytest.approx(0.3, abs=0.04)
    assert torch.equal(drawn.condition.index[~gone], before[~gone])
    assert torch.equal(drawn.t, whole.t), "nothing else that is random changes"
    assert torch.equal(drawn.eps, whole.eps)
    with pytest.raises(TcmError, match="label_dropout=1 must be at least 0 and below 1; use 0 for none"):
        replace(objective, label_dropout=1.0)


@pytest.mark.parametrize("objective", DROPPING, ids=["diffusion", "consistency", "truncated", "tangents"])
def test_nothing_is_drawn_for_label_dropout_that_is_off(objective: Objective) -> None:
    batch = Batch.whole(torch.zeros(5, 1, 1, 1), Labels(torch.arange(5)))
    models, streams = {"student": Exact(gaussian_denoiser(S), (1, 1, 1))}, SampleStreams(range(5))
    assert objective.draw(models, batch, 0, streams).condition is batch.condition
    untouched = SampleStreams(range(5))
    draw(objective.times.at(0), models, batch, untouched)
    assert torch.equal(streams.uniform(), untouched.uniform()), "so losses keep their bits"


@pytest.mark.parametrize("pairs_by", [Pairs, Tangents])
def test_a_hidden_condition_is_hidden_from_student_frozen_model_and_teacher_alike(pairs_by: type[Pairs]) -> None:
    """The loss of a batch whose conditions are dropped is that of a batch that has none of them."""
    f = lively(networks()[0], Classes(3))
    models = {"student": f, "frozen": lively(networks()[0], Classes(3)), "teacher": lively(networks()[0], Classes(3))}
    pairs = pairs_by(proportional(0.1), distillation=Distillation(guidance=2.0))
    objective = TruncatedConsistency(STAGE_2.times, pairs, label_dropout=1 - 1e-12)
    x = torch.rand(8, 1, 8, 8)
    found = [
        objective.loss(models, Batch.whole(x, Labels(labels)), 0, SampleStreams(range(8))).total
        for labels in (torch.arange(8) % 3, torch.full((8,), -1))
    ]
    assert torch.equal(found[0], found[1])
    kept = replace(objective, label_dropout=0.0)
    other = kept.loss(models, Batch.whole(x, Labels(torch.arange(8) % 3)), 0, SampleStreams(range(8))).total
    assert not torch.allclose(other, found[0])


@given(st.integers(2, 3000), st.floats(0.001, 0.999))
def test_boundary_samples_are_the_first_and_exactly_the_floor(B: int, rho: float) -> None:
    objective = TruncatedConsistency(STAGE_2.times, rho=rho)
    batch = Batch(torch.empty(0), None, torch.arange(B), B)
    if int(B * rho) == 0:
        with pytest.raises(TcmError, match=f"batch of {B}"):
            objective.is_boundary(batch)
        return
    N_B = objective.boundary_count(B)
    assert int(B * rho + 1e-9) == N_B
    assert objective.is_boundary(batch).tolist() == [True] * N_B + [False] * (B - N_B)


def test_a_batch_without_boundary_samples_names_the_smallest_that_has_one() -> None:
    with pytest.raises(TcmError, match="at least 4"):
        STAGE_2.boundary_count(3)
    assert STAGE_2.boundary_count(4) == 1
    with pytest.raises(TcmError, match="at least 10"):
        TruncatedConsistency(STAGE_2.times, rho=0.1).boundary_count(9)
    assert TruncatedConsistency(STAGE_2.times, rho=0.1).boundary_count(10) == 1


@pytest.mark.parametrize("rho", [0.0, 1.0, -0.1, float("nan")])
def test_impossible_shares_of_boundary_samples(rho: float) -> None:
    with pytest.raises(TcmError, match="rho="):
        TruncatedConsistency(STAGE_2.times, rho=rho)


def test_times_below_the_dividing_time_are_refused() -> None:
    with pytest.raises(TcmError, match=r"is below t_prime=1.5"):
        TruncatedConsistency(STAGE_2.times, t_prime=1.5)


def test_a_truncated_step_needs_the_frozen_model() -> None:
    f = Exact(gaussian_consistency(S), SHAPE)
    with pytest.raises(TcmError, match=r"t_prime=1 needs models\['frozen'\]"):
        STAGE_2.loss({"student": f}, Batch.whole(torch.zeros(4, *SHAPE)), 0, SampleStreams(range(4)))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("low", [0.5, 2.0])
def test_a_network_is_never_called_for_no_sample(low: float, shared: bool) -> None:
    """All samples on one side of t': where weights are shared, the other network takes part with one row, unused."""
    x, t = torch.ones(3, *SHAPE), torch.full((3,), low, dtype=torch.float64)
    calls: list[int] = []

    def exact(value: float) -> Exact:
        def f(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
            calls.append(len(x))
            return value + 0 * x

        return Exact(f, SHAPE)

    condition, masks = Labels(torch.tensor([0, 1, 2])), [torch.ones(3, 4, dtype=torch.bool)]
    models = {"student": exact(1.0), "frozen": exact(2.0)}
    for f in models.values():
        f.weights_are_shared = shared
    out = f_trunc(models, x, t, Draw(t, x, masks, condition), t_prime=1.0)
    assert sorted(calls) == ([1, 3] if shared else [3])
    assert (out == (2.0 if low < 1 else 1.0)).all()


def test_truncated_function_is_the_frozen_one_strictly_below_the_dividing_time() -> None:
    """TCM Eq. 5: f_θ for t ≥ t', f_θ0 for t < t'."""
    student, frozen = (Exact(lambda x, t, labels, value=value: value + 0 * x, SHAPE) for value in (1.0, 2.0))
    t = torch.tensor([0.5, 1.0 - 1e-12, 1.0, 1.0 + 1e-12, 80.0], dtype=torch.float64)
    x = torch.zeros(5, *SHAPE)
    out = f_trunc({"student": student, "frozen": frozen}, x, t, Draw(t, x, None, None), t_prime=1.0)
    assert out[:, 0, 0, 0].tolist() == [2, 2, 1, 1, 1]


def test_zero_network_meets_the_boundary_condition() -> None:
    """F = 0: f(x, t) = c_skip(t) x → x for t → 0."""
    f = Denoiser(Recorder(), SHAPE)
    nn.init.zeros_(f.network.gain)
    x = torch.randn(1, *SHAPE)
    for t in (SMALLEST_R, 0.002):
        torch.testing.assert_close(f(x, torch.tensor([t])), x, rtol=4.1 * t**2 + 1e-6, atol=0)
    assert float((f(x, torch.tensor([80.0])) / x).detach().abs().max()) < 1e-4


@pytest.mark.parametrize("kind", [Pairs, Tangents])
def test_a_model_is_asked_only_where_it_is_defined(kind: type[Pairs]) -> None:
    """A truncated model in place of the frozen one, a teacher of less noise: the role and both ranges are named."""
    f = lively(networks()[0])
    batch, streams = Batch.whole(torch.zeros(8, *f.image_shape)), SampleStreams(range(8))
    truncated, weak = Denoiser(f.network, f.image_shape, t_min=1.5), Denoiser(f.network, f.image_shape, t_max=1.0)
    objective = TruncatedConsistency(LogStudentT(0, 0.2, low=1.0), kind(Curriculum(d=0)), t_prime=1.0)
    words = r"asks models\['frozen'\] for times from .* defined only from 1.5 to 80; pass a model that covers them"
    with pytest.raises(TcmError, match=words):
        objective.loss({"student": f, "frozen": truncated}, batch, 0, streams)
    distilled = Consistency(pairs=kind(distillation=Distillation()))
    with pytest.raises(TcmError, match=r"asks models\['teacher'\] for times .* defined only from 0.002 to 1;"):
        distilled.loss({"student": f, "teacher": weak}, batch, 0, streams)
