"""Knowledge distillation: a data set that stores where its images come from, and a student that learns the map.

The teacher is the exact one of N(0, s²), so that the map is known: f(x_T, T) = x_T s/√(s² + T²).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tcm.data import ArrayDataset
from tcm.data.dataset import Indices
from tcm.data.pixels import to_uint8
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.objectives import Batch, Losses, Models, Objective, Trajectory
from tcm.method.sampling import ConsistencySampler
from tcm.recipes.stages import Setting, Stage

S, TIMES = 0.3, (10.0, 1.0)
"""The standard deviation of the data, and the times of the stored points."""


def point(x_T: Tensor, t: float) -> Tensor:
    """x_t on the trajectory of N(0, s²) through x_T; the image is x_0."""
    return x_T * ((S**2 + t**2) / (S**2 + TIMES[0] ** 2)) ** 0.5


class GaussianPairs(ArrayDataset):
    """The teacher's images, and two points of each trajectory. Not `in_memory`, so that workers may read it."""

    in_memory = False

    def __init__(self, count: int = 48) -> None:
        x_T = TIMES[0] * torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        self.points, self.times = torch.stack([point(x_T, t) for t in TIMES], dim=1), torch.tensor(TIMES)
        super().__init__(to_uint8(point(x_T, 0.0)).numpy())

    def trajectory(self, indices: Indices) -> Trajectory:
        return Trajectory(self.points[np.asarray(indices)], self.times)


@dataclass(frozen=True)
class Regression(Objective):
    """E |f(x_T, T) − x|."""

    times = None

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        if batch.trajectory is None:
            raise TcmError("the data has no trajectories to learn from; use stored_noise:GaussianPairs")
        student = models["student"]
        x_T, t = batch.trajectory.points[:, 0], batch.trajectory.t[:1].double().expand(len(batch.x))
        output = student(x_T, t, batch.condition, student.network.draw_masks(streams))
        weighted = (output - batch.x).abs().flatten(1).mean(1)
        total = weighted.sum() / batch.B
        return Losses(total, {"regression": total.detach()}, weighted.detach(), t)


@dataclass(frozen=True)
class OneStepSampler(ConsistencySampler):
    """The model knows T only."""

    kind: Literal["stored_noise:OneStepSampler"] = "stored_noise:OneStepSampler"

    usual_steps = (1,)


class RegressionStage(Stage):
    """Learns from stored pairs."""

    objective: Literal["stored_noise:RegressionStage"] = "stored_noise:RegressionStage"

    def build(self, setting: Setting) -> Regression:
        return Regression()

    def describe(self) -> str:
        return "regression on stored pairs"

    def sampler(self, second_time: float) -> OneStepSampler:
        return OneStepSampler(second_time=second_time)
