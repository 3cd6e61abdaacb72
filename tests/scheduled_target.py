"""CM (2023), consistency training: a grid that becomes finer, a target that follows the student ever more slowly."""

from dataclasses import dataclass, replace
from math import ceil, exp, log, sqrt
from typing import Literal, Self

import torch
from torch import Tensor

from tcm.foundation.randomness import SampleStreams
from tcm.method.averaging import Decay
from tcm.method.distances import SquaredL2
from tcm.method.objectives import Batch, Losses, Models, Objective, draw
from tcm.method.preconditioning import Shifted, column
from tcm.method.solvers import karras_times
from tcm.method.times import TimeDistribution
from tcm.recipes.stages import Role, Rows, Setting, Stage


@dataclass(frozen=True)
class Schedule:
    """N(k) = ⌈√(k/K ((s₁ + 1)² − s₀²) + s₀²) − 1⌉ + 1 and μ(k) = exp(s₀ ln μ₀/N(k)) at step k of K."""

    K: int
    s0: int = 2
    s1: int = 150
    mu0: float = 0.9

    def N(self, k: int) -> int:
        return ceil(sqrt(k / self.K * ((self.s1 + 1) ** 2 - self.s0**2) + self.s0**2) - 1) + 1

    def mu(self, k: int) -> float:
        return exp(self.s0 * log(self.mu0) / self.N(k))


@dataclass(frozen=True)
class ScheduledDecay(Decay):
    """β_i = μ(i − 1)."""

    schedule: Schedule

    def beta(self, iteration: int) -> float:
        return self.schedule.mu(iteration - 1)


@dataclass(frozen=True)
class UniformGrid(TimeDistribution):
    """Each of t_2, …, t_N with the same probability; N = N(k) at step k."""

    schedule: Schedule
    low: float = 0.002
    high: float = 80.0
    step: int = 0

    @property
    def span(self) -> tuple[float, float]:
        return self.low, self.high

    def within(self, low: float, high: float) -> Self:
        return replace(self, low=low, high=high)

    def at(self, step: int) -> Self:
        return replace(self, step=step)

    @property
    def times(self) -> Tensor:
        return torch.tensor(karras_times(self.schedule.N(self.step), *self.span)[::-1], dtype=torch.float64)

    def quantile(self, u: Tensor) -> Tensor:
        upper = self.times[1:]
        return upper[(u.cpu().double() * len(upper)).long().clamp(max=len(upper) - 1)]

    def density(self, t: Tensor) -> Tensor:
        widths = self.times.diff()
        return (1 / (len(widths) * widths))[(torch.searchsorted(self.times, t.double()) - 1).clamp(0, len(widths) - 1)]


@dataclass(frozen=True)
class ConsistencyTraining(Objective):
    """E d(f(x + t_{n+1} ε, t_{n+1}), f̄(x + t_n ε, t_n)), where f̄ is an average of f."""

    times: UniformGrid

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        grid = self.times.at(step)
        drawn = draw(grid, models, batch, streams)
        t, r = drawn.t, grid.times[torch.searchsorted(grid.times, drawn.t) - 1]
        x_t, x_r = (batch.x + column(time, batch.x) * drawn.eps for time in (t, r))
        with torch.no_grad():
            target = models["target"](x_r, r, drawn.condition, drawn.masks)
        weighted = SquaredL2()(models["student"](x_t, t, drawn.condition, drawn.masks), target)
        total = weighted.sum() / batch.B
        return Losses(total, {"consistency": total.detach()}, weighted.detach(), t)


class ScheduledTargetStage(Stage):
    """Consistency training with a target that is an average of the student."""

    objective: Literal["scheduled_target:ScheduledTargetStage"] = "scheduled_target:ScheduledTargetStage"
    s0: int = 2
    s1: int = 150
    mu0: float = 0.9

    @property
    def course(self) -> Schedule:
        return Schedule(self.steps, self.s0, self.s1, self.mu0)

    def build(self, setting: Setting) -> ConsistencyTraining:
        return ConsistencyTraining(UniformGrid(self.course).within(*self.span(setting)))

    def describe(self) -> str:
        return "consistency training with a target network"

    def roles(self, setting: Setting) -> dict[str, Role]:
        return {"target": Role(follows=("student", ScheduledDecay(self.course)))}

    def rows(self) -> Rows:
        return Rows(gradient=1, plain=1)


class ShiftedStage(ScheduledTargetStage):
    """Its model is the identity at t_min, whatever the preconditioning of the recipe's other stages."""

    objective: Literal["scheduled_target:ShiftedStage"] = "scheduled_target:ShiftedStage"

    def card_fields(self, setting: Setting) -> dict[str, object]:
        return {"preconditioning": Shifted(setting.t_min)}
