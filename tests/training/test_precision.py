"""Must show 3: bf16 lands near fp32; fp16's loss scaling as far as a CPU goes."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from inprocess import begin, events, train
from launching import losses, model_weights, tiny_recipe

from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Classes, Labels
from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.networks import DDPMppConfig, EDM2Config
from tcm.training.precision import store_in_bfloat16

pytestmark = pytest.mark.usefixtures("quick_look_at_rounding")

LENGTH = ("diffusion.steps=60", "diffusion.sample_every=0", "diffusion.log_every=10", "diffusion.checkpoint_every=60")


def trained(folder: Path, precision: str) -> list[float]:
    folder.mkdir()
    loop, stop = begin(folder, "diffusion", lambda objective: objective, f"diffusion.precision={precision}", *LENGTH)
    assert loop.run(stop)
    assert all(tensor.dtype == torch.float32 for tensor in loop.trainer.student.state_dict().values())
    return losses(folder)


def test_bf16_lands_near_fp32(tmp_path: Path) -> None:
    full, half = trained(tmp_path / "fp32", "fp32"), trained(tmp_path / "bf16", "bf16")
    assert full != half
    assert half == pytest.approx(full, rel=0.05)
    assert mean(half[-2:]) < 0.8 * half[0]


@dataclass(frozen=True)
class Overflowing(Objective):
    """An objective whose gradient overflows at one step."""

    whole: Objective
    at: int

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        losses = self.whole.loss(models, batch, step, streams, turn)
        # The loss stays finite: it is the gradient that overflows.
        overflow = 1e38 * (losses.total - losses.total.detach()) if step == self.at else 0.0
        return replace(losses, total=losses.total + overflow)


def at_step(step: int) -> Callable[[Objective], Objective]:
    return lambda objective: Overflowing(objective, step)


@pytest.mark.parametrize("guard", ["true", "false"])
def test_an_overflow_is_skipped_and_the_scale_falls(tmp_path: Path, guard: str) -> None:
    loop, _ = begin(
        tmp_path, "diffusion", at_step(1), "diffusion.precision=fp16", f"diffusion.guard.on={guard}",
        "diffusion.batch=4",
    )  # fmt: skip
    assert loop.trainer.step(0, loop.batches.at(0)).verdict == "good"
    before = {name: tensor.clone() for name, tensor in loop.trainer.student.state_dict().items()}
    assert loop.trainer.learner.scaler.get_scale() == 16
    record = loop.trainer.step(1, loop.batches.at(1))
    assert record.verdict == ("skip" if guard == "true" else "good")
    assert loop.trainer.learner.scaler.get_scale() == 8
    after = loop.trainer.student.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_fp16_goes_on_with_its_scale(tmp_path: Path) -> None:
    """The scale and its growth are part of a checkpoint; a resumed run ends as an undisturbed one."""
    words = ("diffusion.precision=fp16", "diffusion.sample_every=0", "diffusion.steps=5")
    ends = []
    for name in ("straight", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        loop, stop = begin(folder, "diffusion", at_step(1), *words)
        if name == "resumed":
            stop.by = "SIGTERM"
            assert not loop.run(stop)
            assert not begin(folder, "diffusion", at_step(1), *words)[0].run(stop)
            loop, stop = begin(folder, "diffusion", at_step(1), *words)
        assert loop.run(stop)
        (overflow,) = events(folder)
        assert overflow["reason"].startswith("the gradient norm is")
        ends.append((loop.trainer.learner.scaler.state_dict(), loop.trainer.tensors()))
    (state, tensors), (other_state, other_tensors) = ends
    assert state == other_state
    assert (state["scale"], state["_growth_tracker"]) == (8.0, 3)
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


NETWORKS = {"ddpmpp": DDPMppConfig(channels=16, channel_mult=(1, 2), blocks=1, attention=(8,)),
            "edm2": EDM2Config(channels=16, channel_mult=(1, 2), blocks=1)}  # fmt: skip


@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_frozen_weights_in_bfloat16(config: DDPMppConfig | EDM2Config) -> None:
    """Half the memory, and in every other respect the network whose weights were rounded once: no noise."""
    network = config.build((1, 8, 8), Classes(10)).requires_grad_(False)
    for parameter in network.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 3)
    rounded = deepcopy(network)
    for parameter in rounded.parameters():
        parameter.copy_(parameter.bfloat16())
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    store_in_bfloat16(network)
    arguments = (torch.randn(3, 1, 8, 8), torch.tensor([-1.5, 0.0, 1.0]), Labels(torch.tensor([1, 2, -1])), None)
    assert torch.equal(network(*arguments), rounded(*arguments))
    sizes = [sum(parameter.nbytes for parameter in one.parameters()) for one in (network, rounded)]
    assert sizes[0] * 2 == sizes[1]
    assert len(buffers) == (2 if config.kind == "edm2" else 0)
    for name, buffer in network.named_buffers():
        assert buffer.dtype == torch.float32, "Fourier features too"
        assert torch.equal(buffer, buffers[name])


def test_a_stage_with_frozen_weights_in_bfloat16(tmp_path: Path) -> None:
    """The boundary moves a little; the model that comes out is float32's."""
    found = {}
    words = ("truncated.sample_every=0", "truncated.log_every=1", 'order=["diffusion", "consistency", "truncated"]')
    for precision in ("fp32", "bf16"):
        train(tiny_recipe(2, *words, f"truncated.frozen_precision={precision}"), tmp_path / precision)
        found[precision] = losses(tmp_path / precision / "2-truncated", "boundary")
        weights = model_weights(tmp_path / precision, "2-truncated")
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.05)


def test_clipping(tmp_path: Path) -> None:
    """The recorded norm is that before clipping; the gradients have the limit's."""
    loop, _ = begin(tmp_path, "diffusion", lambda objective: objective, "diffusion.clip=0.01")
    record = loop.trainer.step(0, loop.batches.at(0))
    assert record.numbers["gradient_norm"] > 0.01
    norm = torch.cat([p.grad.flatten() for p in loop.trainer.student.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
