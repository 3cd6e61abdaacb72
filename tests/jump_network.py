"""A second time: a network that jumps from t to s takes s as a part of its condition."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from tcm.foundation.devices import to_device
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition, ConditionKind
from tcm.method.objectives import Batch, Losses, Models, Objective, draw
from tcm.method.preconditioning import Denoiser, Masks, Network, column
from tcm.method.sampling import Sampler, SamplingStep, consistency_times
from tcm.method.times import LogNormal, TimeDistribution
from tcm.networks import ImageShape, NetworkConfig
from tcm.recipes.stages import Setting, Stage


@dataclass(frozen=True)
class Towards(Condition):
    """The time s (B,) to jump to, and the condition that the model has besides."""

    s: Tensor
    besides: Condition | None

    def __len__(self) -> int:
        return len(self.s)

    def select(self, rows: Tensor | slice) -> Self:
        return type(self)(self.s[rows], None if self.besides is None else self.besides.select(rows))

    def keep(self, kept: Tensor) -> Self:
        return type(self)(self.s, None if self.besides is None else self.besides.keep(kept))

    def to(self, device: torch.device) -> Self:
        return type(self)(self.s.to(device), None if self.besides is None else self.besides.to(device))


def jump(f: Denoiser, x_t: Tensor, t: Tensor, s: Tensor, condition: Condition | None) -> Tensor:
    """G(x_t, t, s) = f(x_t, t, s) + (s/t) (x_t − f(x_t, t, s)); G(x_t, t, 0) = f(x_t, t, 0)."""
    f_x = f(x_t, t, Towards(to_device(s.to(x_t.dtype), x_t.device), condition))
    return f_x + column(s / t, x_t) * (x_t - f_x)


class JumpConfig(NetworkConfig):
    """Two convolutions with two times."""

    kind: Literal["jump_network:JumpConfig"] = "jump_network:JumpConfig"
    channels: int = 4

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "JumpNetwork":
        return JumpNetwork(self, image_shape)


class JumpNetwork(Network):
    """Without an s it jumps to 0."""

    def __init__(self, config: JumpConfig, image_shape: ImageShape) -> None:
        super().__init__()
        self.enter = nn.Conv2d(image_shape[0], config.channels, 3, padding=1)
        self.times = nn.Linear(2, config.channels)
        self.leave = nn.Conv2d(config.channels, image_shape[0], 3, padding=1)

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        s = condition.s if isinstance(condition, Towards) else torch.zeros_like(c_noise)
        times = self.times(torch.stack([c_noise, s.log1p() / 4], dim=1))
        return self.leave(torch.relu(self.enter(x) + times[:, :, None, None]))


@dataclass(frozen=True)
class Jumps(Objective):
    """E ‖G(x + tε, t, s) − (x + sε)‖²/d with s uniform on [0, t]."""

    times: TimeDistribution

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        drawn = draw(self.times, models, batch, streams)
        t, eps = drawn.t, drawn.eps
        s = streams.uniform() * t
        landed = jump(models["student"], batch.x + column(t, batch.x) * eps, t, s, drawn.condition)
        weighted = (landed - batch.x - column(s, batch.x) * eps).flatten(1).square().mean(1)
        total = weighted.sum() / batch.B
        return Losses(total, {"jump": total.detach()}, weighted.detach(), t)


@dataclass(frozen=True)
class JumpSampler(Sampler):
    """Jumps from T down to `lowest`, and from there to 0, without new noise."""

    kind: Literal["jump_network:JumpSampler"] = "jump_network:JumpSampler"
    lowest: float = 1.0

    model = "jump"
    usual_steps = (1, 2)
    generates_at_once = True

    @torch.no_grad()
    def run(
        self,
        f: Denoiser,
        streams: SampleStreams,
        condition: Condition | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        first: Tensor | None = None,
    ) -> Iterator[SamplingStep]:
        noise = streams.normal(f.image_shape) if first is None else first
        found = consistency_times(steps or 1, f.t_max, self.lowest) if times is None else times
        x = found[0] * noise.to(next(f.parameters()).device)
        for t, s in zip(found, [*found[1:], 0.0], strict=True):
            x_t = x
            x = jump(f, x_t, torch.full((len(x),), t), torch.full((len(x),), s), condition)
            yield SamplingStep(t, x_t, x)

    def describe(self, f: Denoiser, steps: int | None, times: Sequence[float] | None) -> str:
        return f"{steps or 1} jumps"

    def evaluations(self, steps: int) -> int:
        return steps

    def name(self, steps: int) -> str:
        return f"{steps} jumps"


class JumpStage(Stage):
    """Jumps between all times."""

    objective: Literal["jump_network:JumpStage"] = "jump_network:JumpStage"

    def build(self, setting: Setting) -> Jumps:
        return Jumps(LogNormal(-1.1, 2.0).within(*self.span(setting)))

    def describe(self) -> str:
        return "jumps between all times"

    def sampler(self, second_time: float) -> JumpSampler:
        return JumpSampler(lowest=second_time)
