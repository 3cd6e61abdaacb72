"""What every objective shares: the models and the batch that go in, the losses that come out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition
from tcm.method.distances import Distance
from tcm.method.preconditioning import Denoiser, Masks
from tcm.method.times import TimeDistribution

Models = Mapping[str, Denoiser]
"""The models by their role: always the "student" f_θ; "frozen" is f_θ0⁻ of the stage before, "teacher" the diffusion
model D to distil from; a method may name others."""

ROUNDING = 1e-6
"""How far, relatively, a time may lie beyond a model's range."""


@dataclass(frozen=True)
class Trajectory:
    """Stored points x_{t_1}, …, x_{t_n} (B, n, C, H, W) of a teacher's trajectories, at their times t (n,).

    The images themselves are where the trajectories end; for knowledge distillation the one point is the noise.
    """

    points: Tensor
    t: Tensor

    def check(self, images: tuple[int, ...]) -> None:
        """Refuse points that do not belong to images of this shape (B, C, H, W)."""
        count, *image = images
        wanted = (count, len(self.t), *image)
        if self.t.ndim != 1 or self.points.shape != wanted:
            raise TcmError(
                f"a trajectory has points of shape {list(self.points.shape)} at times of shape {list(self.t.shape)}; "
                f"give points {list(wanted)}, one for each image and time, and times [n]"
            )

    def select(self, rows: slice) -> "Trajectory":
        """Those of some samples."""
        return Trajectory(self.points[rows], self.t)

    def to(self, device: torch.device) -> "Trajectory":
        """The points on a device; times stay on the CPU."""
        return Trajectory(to_device(self.points, device), self.t)


@dataclass(frozen=True)
class Batch:
    """Images x in [−1, 1]: the whole global batch of B samples, or the share with these indices in it."""

    x: Tensor
    condition: Condition | None
    index: Tensor
    B: int
    trajectory: Trajectory | None = None

    @staticmethod
    def whole(x: Tensor, condition: Condition | None = None) -> "Batch":
        """A batch that is not shared with other processes or micro-batches."""
        return Batch(x, condition, torch.arange(len(x)), len(x))


@dataclass(frozen=True)
class Draw:
    """What is random in a step: times t (float64, CPU), noise ε, dropout masks, and the condition as seen."""

    t: Tensor
    eps: Tensor
    masks: Masks | None
    condition: Condition | None

    def select(self, rows: Tensor) -> "Draw":
        """That of some samples."""
        here = to_device(rows, self.eps.device)
        condition = None if self.condition is None else self.condition.select(here)
        masks = None if self.masks is None else [mask[here] for mask in self.masks]
        return Draw(self.t[rows], self.eps[here], masks, condition)


@dataclass(frozen=True)
class Losses:
    """`total` and its named parts are this share's terms of the global batch's loss: over all shares they add up to it.

    `weighted` is the weighted loss of each sample, at its time `t`.
    """

    total: Tensor
    parts: dict[str, Tensor]
    weighted: Tensor
    t: Tensor


class Objective(ABC):
    """What a stage minimises; a frozen dataclass, so that nothing is remembered from step to step."""

    times: TimeDistribution | None
    """How its training times are drawn; None if it draws none."""

    @abstractmethod
    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        """The loss of the network whose `turn` it is: the role whose weights move in this update."""

    def comparing_by(self, change: Callable[[Distance], Distance]) -> "Objective":
        """The objective with its pairs' distance changed; one without pairs is itself."""
        return self

    def schedule(self, step: int) -> dict[str, float]:
        """What the objective changes over the steps, by name: for metrics and figures."""
        return {}


def draw(
    times: TimeDistribution, models: Models, batch: Batch, streams: SampleStreams, label_dropout: float = 0.0
) -> Draw:
    """t ~ ψ_t, ε ~ N(0, I), dropout masks; the condition is dropped with probability `label_dropout`."""
    t = times.quantile(streams.uniform())
    eps = streams.normal(batch.x.shape[1:])
    masks, condition = models["student"].network.draw_masks(streams), batch.condition
    if condition is not None and label_dropout:
        condition = condition.keep(streams.uniform() >= label_dropout)
    return Draw(t, eps, masks, condition)


def check_label_dropout(label_dropout: float) -> None:
    """Refuse what is not a probability, or hides every condition."""
    if not 0 <= label_dropout < 1:
        raise TcmError(f"label_dropout={label_dropout:g} must be at least 0 and below 1; use 0 for none")


def model_of(models: Models, role: str, why: str, t: Tensor) -> Denoiser:
    """The model of a role that an objective cannot do without, which has to be defined at the times t."""
    if role not in models:
        raise TcmError(f"{why} needs models[{role!r}], which is missing; pass it")
    f, low, high = models[role], float(t.min()), float(t.max())
    if low < f.t_min * (1 - ROUNDING) or high > f.t_max * (1 + ROUNDING):
        raise TcmError(
            f"{why} asks models[{role!r}] for times from {low:g} to {high:g}, but it is defined only from {f.t_min:g} "
            f"to {f.t_max:g}; pass a model that covers them"
        )
    return f
