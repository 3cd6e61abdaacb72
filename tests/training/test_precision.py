"""Must show 3: bf16 lands near fp32; fp16's loss scaling as far as a CPU goes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from inprocess import begin, events
from launching import losses

from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.method.streams import SampleStreams

LENGTH = ("diffusion.steps=60", "diffusion.sample_every=0", "diffusion.log_every=10", "diffusion.checkpoint_every=60")


def trained(folder: Path, precision: str) -> list[float]:
    folder.mkdir()
    fit, stop = begin(folder, "diffusion", lambda objective: objective, f"diffusion.precision={precision}", *LENGTH)
    assert fit.run(stop)
    assert all(tensor.dtype == torch.float32 for tensor in fit.trainer.student.state_dict().values())
    return losses(folder)


def test_bf16_lands_near_fp32(tmp_path: Path) -> None:
    full, half = trained(tmp_path / "fp32", "fp32"), trained(tmp_path / "bf16", "bf16")
    assert full != half
    assert half == pytest.approx(full, rel=0.05)
    assert mean(half[-2:]) < 0.8 * half[0]


@dataclass(frozen=True)
class Overflowing:
    """An objective whose gradient overflows at one step."""

    whole: Objective
    at: int

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Losses:
        losses = self.whole.loss(models, batch, step, streams)
        # The loss stays finite: it is the gradient that overflows.
        overflow = 1e38 * (losses.total - losses.total.detach()) if step == self.at else 0.0
        return replace(losses, total=losses.total + overflow)


def at_step(step: int) -> Callable[[Objective], Objective]:
    return lambda objective: Overflowing(objective, step)


@pytest.mark.parametrize("guard", ["true", "false"])
def test_an_overflow_is_skipped_and_the_scale_falls(tmp_path: Path, guard: str) -> None:
    fit, _ = begin(
        tmp_path, "diffusion", at_step(1), "diffusion.precision=fp16", f"diffusion.guard.on={guard}",
        "diffusion.batch=4",
    )  # fmt: skip
    assert fit.trainer.step(0, fit.batches.at(0)).verdict == "good"
    before = {name: tensor.clone() for name, tensor in fit.trainer.student.state_dict().items()}
    assert fit.trainer.scaler.get_scale() == 16
    record = fit.trainer.step(1, fit.batches.at(1))
    assert record.verdict == ("skip" if guard == "true" else "good")
    assert fit.trainer.scaler.get_scale() == 8
    after = fit.trainer.student.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_fp16_goes_on_with_its_scale(tmp_path: Path) -> None:
    """The scale and its growth are part of a checkpoint; a resumed run ends as an undisturbed one."""
    words = ("diffusion.precision=fp16", "diffusion.batch=4", "diffusion.sample_every=0")
    ends = []
    for name in ("straight", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        fit, stop = begin(folder, "diffusion", at_step(1), *words)
        if name == "resumed":
            stop.by = "SIGTERM"
            assert not fit.run(stop)
            assert not begin(folder, "diffusion", at_step(1), *words)[0].run(stop)
            fit, stop = begin(folder, "diffusion", at_step(1), *words)
        assert fit.run(stop)
        (overflow,) = events(folder)
        assert overflow["reason"].startswith("the gradient norm is")
        ends.append((fit.trainer.scaler.state_dict(), fit.trainer.tensors()))
    (state, tensors), (other_state, other_tensors) = ends
    assert state == other_state
    assert (state["scale"], state["_growth_tracker"]) == (8.0, 10)
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


def test_clipping(tmp_path: Path) -> None:
    """The recorded norm is that before clipping; the gradients have the limit's."""
    fit, _ = begin(tmp_path, "diffusion", lambda objective: objective, "diffusion.clip=0.01")
    record = fit.trainer.step(0, fit.batches.at(0))
    assert record.gradient_norm > 0.01
    norm = torch.cat([p.grad.flatten() for p in fit.trainer.student.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
