"""Networks and losses against numbers from the paper's reference implementation."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tcm import Batch, Consistency, Curriculum, Denoiser, Labels, LogStudentT, Pairs, PseudoHuber, TruncatedConsistency
from tcm.method.distances import inverse_c_out_squared, inverse_delta
from tcm.method.objectives import Draw, Losses, f_trunc
from tcm.method.preconditioning import column
from tcm.weights.edm_names import load_denoiser

WEIGHTINGS = {"default": inverse_delta, "cout_sq": inverse_c_out_squared}


def gradient_norm(denoiser: Denoiser) -> float:
    return float(torch.stack([p.grad.norm() for p in denoiser.parameters() if p.grad is not None]).norm())


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", ["ddpmpp_uncond_16", "edm2_cond_16"])
def test_network(golden, name: str) -> None:
    tensors, arguments = golden(name)
    denoiser = load_denoiser(part(tensors, "weights."), arguments)
    labels = Labels(tensors["in.labels"].argmax(1)) if "in.labels" in tensors else None
    denoised = denoiser(tensors["in.x"], tensors["in.t"], labels)
    torch.testing.assert_close(denoised, tensors["out.denoised"], rtol=1e-4, atol=1e-5)
    denoised.square().mean().backward()
    assert gradient_norm(denoiser) == pytest.approx(float(tensors["out.grad_norm"]), rel=1e-3)


@dataclass(frozen=True)
class Case:
    """A golden loss, computed; `alone` for one sample at a time, `boundary` says which are boundary samples."""

    tensors: dict[str, Tensor]
    student: Denoiser
    losses: Losses
    alone: Tensor
    boundary: Tensor
    r: Tensor
    rounding: Tensor


@pytest.fixture(scope="module", params=["loss_stage1_cifar", "loss_stage2_cifar", "loss_stage2_imagenet"])
def case(request, golden) -> Case:
    tensors, settings = golden(request.param)
    curriculum = Curriculum(d=0, limit=settings["ratio"])
    pairs = Pairs(curriculum, PseudoHuber(settings["c"]), WEIGHTINGS[settings["weighting"]])
    t, x = tensors["in.t"].double(), tensors["in.x"]
    student = load_denoiser(part(tensors, "student."), settings)
    batch, draw = Batch.whole(x), Draw(t, tensors["in.eps"], None, None)
    if settings["stage"] == 1:
        objective = Consistency(pairs=pairs)
        models, boundary = {"student": student}, torch.zeros(len(x), dtype=torch.bool)
    else:
        objective = TruncatedConsistency(
            LogStudentT(0, 0.2, 1.0), pairs, settings["t_prime"], settings["w_b"], settings["rho"]
        )
        boundary = objective.is_boundary(batch)
        assert boundary.tolist() == [i < settings["n_boundary"] for i in range(len(x))]
        models = {"student": student, "frozen": load_denoiser(part(tensors, "frozen."), settings)}
    losses = objective.loss_at(models, batch, 0, draw)
    alone = torch.cat([objective.loss_at(models, *sample(batch, draw, i)).weighted for i in range(len(x))])
    r = t - curriculum.delta(t, 0)
    with torch.no_grad():
        later = student(x + column(t, x) * draw.eps, t)
        earlier = f_trunc(
            models, x + column(r, x) * draw.eps, r, draw, settings["t_prime"] if "frozen" in models else 0
        )
    return Case(tensors, student, losses, alone, boundary, r, rounding_error(later, earlier, settings["c"]))


def sample(batch: Batch, draw: Draw, i: int) -> tuple[Batch, int, Draw]:
    """Sample i of the batch as a share of its own, at step 0."""
    row = slice(i, i + 1)
    return Batch(batch.x[row], None, batch.index[row], batch.B), 0, Draw(draw.t[row], draw.eps[row], None, None)


def rounding_error(a: Tensor, b: Tensor, c: float) -> Tensor:
    """The relative error that rounding in float32 causes in each sample's pseudo-Huber distance.

    Errors of eps ‖a‖ and eps ‖b‖ in the outputs change ‖a − b‖ by up to eps (‖a‖ + ‖b‖). A relative error of ‖a − b‖
    grows by 1 + c/√(‖a − b‖² + c²) in the pseudo-Huber distance: to itself far above c, to its double far below.
    The arithmetic after the outputs (sum, root, weight) adds a few eps.
    """
    size, distance = a.flatten(1).norm(dim=1) + b.flatten(1).norm(dim=1), (a - b).flatten(1).norm(dim=1)
    growth = 1 + c / (distance**2 + c**2).sqrt()
    return torch.finfo(a.dtype).eps * (growth * size / distance + 4)


def test_earlier_times(case: Case) -> None:
    torch.testing.assert_close(case.r, case.tensors["out.r"].double(), rtol=1e-6, atol=1e-9)


def test_loss_of_each_sample(case: Case) -> None:
    """At t = 80 the loss is a small difference of large numbers, and how they are rounded depends on the CPU."""
    kinds = ["boundary", "consistency"] if case.boundary.any() else ["consistency"]  # boundary samples come first
    expected = torch.cat([case.tensors[f"out.weighted_{kind}"] for kind in kinds])
    allowed = 2 * case.rounding  # the file's rounding and ours
    for ours in (case.losses.weighted, case.alone):  # each batch size is rounded in its own way too
        error = (ours / expected - 1).abs()
        assert (error <= allowed).all(), f"relative errors {error.tolist()}, allowed {allowed.tolist()}"
    assert (allowed < 1e-3).sum() >= 4, "rounding hides too much of too many samples"


def test_total_and_its_parts(case: Case) -> None:
    assert float(case.losses.total.detach()) == pytest.approx(float(case.tensors["out.total"]), rel=1e-3)
    parts = {name: float(value) for name, value in case.losses.parts.items()}
    consistency = float(case.tensors["out.weighted_consistency"].mean())
    assert parts.pop("consistency") == pytest.approx(consistency, rel=1e-3)
    if case.boundary.any():
        assert parts.pop("boundary") == pytest.approx(float(case.tensors["out.weighted_boundary"].mean()), rel=1e-3)
    assert not parts


def test_gradient_norm(case: Case) -> None:
    case.student.zero_grad()
    case.losses.total.backward(retain_graph=True)
    assert gradient_norm(case.student) == pytest.approx(float(case.tensors["out.grad_norm"]), rel=1e-3)


def test_a_sample_near_the_boundary_has_a_frozen_target(golden) -> None:
    tensors, settings = golden("loss_stage2_cifar")
    beyond = slice(settings["n_boundary"], None)
    assert ((tensors["in.t"] > 1) & (tensors["out.r"] < 1))[beyond].any()
