"""The derivative along the trajectory against closed forms, reverse mode, and the differences whose limit it is."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from oracles import Exact, Formula, gaussian_consistency, gaussian_denoiser
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import cosine_similarity

import tcm
from tcm import (
    Batch,
    Classes,
    Consistency,
    Curriculum,
    DDPMppConfig,
    Denoiser,
    Distillation,
    EDM2Config,
    Labels,
    LogStudentT,
    NetworkConfig,
    Pairs,
    PseudoHuber,
    SampleStreams,
    SquaredL2,
    Tangents,
    Texts,
    TruncatedConsistency,
)
from tcm.foundation.duals import dual, parts
from tcm.foundation.errors import TcmError
from tcm.method.distances import Distance
from tcm.method.objectives import Draw
from tcm.method.preconditioning import column
from tcm.method.solvers import guided, slope
from tcm.method.tangents import tangent
from tcm.networks import TextUNetConfig
from tcm.networks.forward_mode import attend

S = 0.5
SHAPE = (1, 4, 4)
TIMES = torch.tensor([0.01, 0.3, 1.0, 7.0, 80.0], dtype=torch.float64)


def noisy(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x_t at each of TIMES for x ~ N(0, S²), and its ε."""
    x, eps = torch.randn(2, len(TIMES), *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (S * x + column(TIMES, x) * eps).to(dtype), eps.to(dtype)


def test_closed_form_on_gaussian_data() -> None:
    """f = D(x, t) = x s²/(s² + t²), behind the real preconditioning in float32, along x_t = x + t ε."""
    x_t, eps = noisy()
    t = column(TIMES, x_t.double())
    known = S**2 / (S**2 + t**2) * eps - 2 * t * S**2 / (S**2 + t**2) ** 2 * x_t
    found = tangent(Denoiser(Formula(gaussian_denoiser(S)), SHAPE), x_t, TIMES, eps)
    assert found.dtype == torch.float32
    assert float(((found - known) * t).abs().max()) < 1e-5
    error, size = ((values.double()).flatten(1).norm(dim=1) for values in (found - known, known))
    assert float((error / size).max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_for_the_exact_consistency_function(dtype: torch.dtype) -> None:
    x_t, eps = noisy(dtype)
    f, D = Exact(gaussian_consistency(S), SHAPE), Exact(gaussian_denoiser(S), SHAPE)
    along = tangent(f, x_t, TIMES, slope(guided(D, None), x_t, TIMES))
    assert float((along * column(TIMES, x_t)).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-13)
    assert float(tangent(f, x_t, TIMES, eps).norm()) > 0.1, "ε is not the trajectory's own direction"


CONFIGS = (
    DDPMppConfig(channels=16, channel_mult=(1, 2), blocks=1, attention=(8,), dropout=0.3),
    EDM2Config(channels=64, channel_mult=(1, 2), blocks=1, attention=(8,), dropout=0.3),
    TextUNetConfig(channels=16, channel_mult=(1, 2), attention=(8,), cross_attention=(8, 4), dropout=0.3),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_networks_against_reverse_mode(config: NetworkConfig) -> None:
    """⟨w, df/dt⟩ is ⟨∂⟨w, f⟩/∂x, dx/dt⟩ + ∂⟨w, f⟩/∂t, under the same condition and dropout masks."""
    torch.manual_seed(0)
    kind = Texts("none", width=6, tokens=5) if config.kind == "text_unet" else Classes(3)
    f = Denoiser(config.build((1, 8, 8), kind), (1, 8, 8), kind)
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.ndim else parameter.fill_(0.8)
    x, dx, w = torch.randn(3, 3, 1, 8, 8)
    t = torch.tensor([0.05, 1.0, 20.0], dtype=torch.float64)
    labels = (
        Labels(torch.tensor([0, 2, -1]))
        if isinstance(kind, Classes)
        else replace(kind.dummy(3), tokens=torch.randn(3, 5, 6), mask=torch.rand(3, 5) > 0.3)
    )
    masks = f.network.draw_masks(SampleStreams(range(3)))
    found = (w * tangent(f, x, t, dx, labels, masks)).flatten(1).sum(1)
    x.requires_grad_()
    t.requires_grad_()
    by_x, by_t = torch.autograd.grad((w * f(x, t, labels, masks)).sum(), (x, t))
    known = (by_x * dx).flatten(1).sum(1) + by_t
    torch.testing.assert_close(found.double(), known.double(), rtol=1e-3, atol=1e-3 * float(known.detach().abs().max()))
    assert all(parameter.grad is None for parameter in f.parameters())


def test_the_derivative_survives_half_precision_and_a_difference_does_not() -> None:
    """The shipped digits model at t = 40, where the two outputs of a pair are most alike."""
    model = tcm.load("digits")
    f, labels = model.denoiser, model.card.condition.spread(16)
    x, eps = torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    t = torch.full((16,), 40.0, dtype=torch.float64)
    r, x_t = 0.999 * t, 0.7 * x + 40 * eps

    def cosines(dtype: torch.dtype) -> tuple[float, float]:
        f.network.arithmetic = dtype
        with torch.no_grad():
            difference = f(x_t, t, labels) - f(0.7 * x + column(r, x) * eps, r, labels)
        derivative = tangent(f, x_t, t, eps, labels)
        f.network.arithmetic = None
        return tuple(float(cosine_similarity(one.flatten(1), exact).mean()) for one in (difference, derivative))

    exact = tangent(f, x_t, t, eps, labels).flatten(1)
    assert min(cosines(torch.float32)) > 0.98
    for half in (torch.bfloat16, torch.float16):
        difference, derivative = cosines(half)
        assert difference < 0.6
        assert derivative > 0.998


def test_attention_in_fp16_does_not_overflow() -> None:
    """q·k = 20 · 20 · 256 is beyond fp16; divided by √256 it is not."""
    q = torch.full((1, 1, 4, 256), 20.0, dtype=torch.float16)
    with forward_ad.dual_level():
        y, dy = parts(attend(dual(q, torch.ones_like(q)), q, dual(q, q)))
    torch.testing.assert_close(y, q, rtol=1e-3, atol=0)
    torch.testing.assert_close(dy, q, rtol=1e-3, atol=0)


def proportional(fraction: float) -> Curriculum:
    """Δ_t = fraction · t."""
    return Curriculum(d=0, limit=1 - fraction, k=0)


class Quadratic(nn.Module):
    """f_θ(x, t) = θ₀ x/(1 + t²) + θ₁ t x²: not a consistency function, so that its gradient does not vanish."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.8, 0.3], dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        return self.theta[0] * x / (1 + t**2) + self.theta[1] * t * x**2


def gradient(pairs: Pairs) -> Tensor:
    """Of the loss by the two parameters of a function that is not consistent, at t = 0.7."""
    generator = torch.Generator().manual_seed(3)
    x, eps = torch.randn(2, 24, *SHAPE, generator=generator, dtype=torch.float64)
    f = Exact(Quadratic(), SHAPE)
    models = {"student": f, "teacher": Exact(gaussian_denoiser(S), SHAPE)}
    draw = Draw(torch.full((24,), 0.7, dtype=torch.float64), eps, None, None)
    Consistency(pairs=pairs).loss_at(models, Batch.whole(S * x), 0, draw).total.backward()
    return f.function.theta.grad


@pytest.mark.parametrize("distance", [SquaredL2(), PseudoHuber(1e-8)], ids=lambda distance: distance.kind)
@pytest.mark.parametrize("distillation", [None, Distillation()], ids=["from data", "distillation"])
def test_the_loss_is_the_limit_of_that_of_differences(distance: Distance, distillation: Distillation | None) -> None:
    """Their gradients differ by O(Δ): slope 1."""
    fractions = np.geomspace(0.03, 0.0003, 5)
    differences = []
    for fraction in fractions:
        limit, finite = (
            gradient(kind(proportional(fraction), distance, distillation=distillation)) for kind in (Tangents, Pairs)
        )
        differences.append(float((finite - limit).norm() / limit.norm()))
    assert np.polyfit(np.log(fractions), np.log(differences), 1)[0] == pytest.approx(1, abs=0.1)
    assert differences[-1] < 0.01


@dataclass(frozen=True)
class Watching(Distance):
    """A squared distance that keeps what it compares."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen.append((x.detach(), y))
        return SquaredL2()(x, y)


def test_the_derivative_has_the_masks_and_the_condition_of_the_pass_with_gradient() -> None:
    torch.manual_seed(0)
    f = Denoiser(CONFIGS[0].build((1, 8, 8), Classes(3)), (1, 8, 8), Classes(3))
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    watching = Watching()
    objective = Consistency(pairs=Tangents(proportional(0.1), watching))
    batch = Batch.whole(torch.rand(8, 1, 8, 8), Labels(torch.arange(8) % 3))
    drawn = objective.draw({"student": f}, batch, 0, SampleStreams(range(8)))
    objective.loss_at({"student": f}, batch, 0, drawn)
    ((f_t, target),) = watching.seen
    x_t = batch.x + column(drawn.t, batch.x) * drawn.eps

    def change(condition: Labels, masks: list[Tensor]) -> Tensor:
        return column(0.1 * drawn.t, x_t) * tangent(f, x_t, drawn.t, drawn.eps, condition, masks)

    others = f.network.draw_masks(SampleStreams(range(50, 58)))
    torch.testing.assert_close(f_t - target, change(drawn.condition, drawn.masks), rtol=1e-4, atol=1e-5)
    for wrong in (change(drawn.condition, others), change(Labels(torch.full((8,), -1)), drawn.masks)):
        assert not torch.allclose(f_t - target, wrong, rtol=1e-2, atol=1e-3)


def test_targets_of_stage_2() -> None:
    """The frozen model's output where t = t', whose gradient is its difference; the derivative elsewhere."""
    watching = Watching()
    objective = TruncatedConsistency(LogStudentT(0, 0.2, low=1.0), Tangents(proportional(0.1), watching), rho=0.5)
    f, frozen = Exact(Quadratic(), SHAPE), Exact(gaussian_consistency(S), SHAPE)
    x, eps = torch.randn(2, 4, *SHAPE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    t = torch.tensor([1.0, 1.0, 1.05, 9.0], dtype=torch.float64)
    models = {"student": f, "frozen": frozen}
    losses = objective.loss_at(models, Batch.whole(x), 0, Draw(t, eps, None, None))
    ((f_t, target),) = watching.seen
    x_t = x + column(t, x) * eps
    torch.testing.assert_close(target[:2], frozen(x_t, t)[:2].detach())
    h = 1e-6
    with torch.no_grad():
        ahead, behind = (f(x + column(at, x) * eps, at) for at in (t + h, t - h))
    change = column(0.1 * t, x) * (ahead - behind) / (2 * h)
    torch.testing.assert_close(target[2:], (f_t - change)[2:], rtol=1e-6, atol=1e-6)
    losses.total.backward()
    assert float(f.function.theta.grad.norm()) > 0
    assert frozen.gain.grad is None
    with pytest.raises(TcmError, match=r"the boundary needs models\['frozen'\]"):
        objective.loss_at({"student": f}, Batch.whole(x), 0, Draw(t, eps, None, None))
