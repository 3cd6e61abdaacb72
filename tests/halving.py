"""Progressive distillation: one step of the student learns two Euler steps of its teacher, in rounds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition
from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.method.preconditioning import Denoiser, column
from tcm.method.sampling import Sampler, SamplingStep
from tcm.method.solvers import euler, guided, karras_times
from tcm.recipes.stages import Role, Rows, Setting, Stage


def grid(steps: int, t_min: float, t_max: float) -> list[float]:
    """`steps` + 1 times from T to 0; every second one of a grid is the grid of half as many steps."""
    return [*karras_times(steps + 1, t_min, t_max)[:-1], 0.0]


def unmove(y: Tensor, x_t: Tensor, t: Tensor, b: Tensor) -> Tensor:
    """The x̂ from which an Euler step from x_t at t lands on y at b: (t y − b x_t)/(t − b)."""
    return (column(t, y) * y - column(b, y) * x_t) / column(t - b, y)


@dataclass(frozen=True)
class Halving(Objective):
    """E max(1/t², 1) ‖f(x_t, t) − Y‖²/d: from t, a step towards Y lands where two steps of the teacher do."""

    grid: tuple[float, ...]
    times = None

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        begin = 2 * (streams.uniform().cpu().double() * (len(self.grid) // 2)).long()
        t, r, b = (torch.tensor(self.grid, dtype=torch.float64)[begin + offset] for offset in range(3))
        x_t = batch.x + column(t, batch.x) * streams.normal(batch.x.shape[1:])
        with torch.no_grad():
            D = guided(models["teacher"], batch.condition)
            target = unmove(euler(D, euler(D, x_t, t, r), r, b), x_t, t, b)
        error = (models["student"](x_t, t, batch.condition) - target).flatten(1).square().mean(1)
        weighted = to_device((1 / t**2).clamp_min(1).to(error.dtype), error.device) * error
        total = weighted.sum() / batch.B
        return Losses(total, {"halving": total.detach()}, weighted.detach(), t)


@dataclass(frozen=True)
class GridSampler(Sampler):
    """Euler steps down the grid that the model was trained on."""

    kind: Literal["halving:GridSampler"] = "halving:GridSampler"
    points: int = 1

    model = "distilled"
    generates_at_once = False

    @property
    def usual_steps(self) -> tuple[int, ...]:
        return (self.points,)

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
        found = grid(steps or self.points, f.t_min, f.t_max)
        noise = streams.normal(f.image_shape) if first is None else first
        x = found[0] * noise.to(next(f.parameters()).device)
        for t, b in pairwise(found):
            x_t = x
            x = euler(guided(f, condition), x_t, torch.full((len(x),), t), torch.full((len(x),), b))
            yield SamplingStep(t, x_t, x)

    def describe(self, f: Denoiser, steps: int | None, times: Sequence[float] | None) -> str:
        return f"Euler, {steps or self.points} steps"

    def evaluations(self, steps: int) -> int:
        return steps

    def name(self, steps: int) -> str:
        return f"Euler, {steps}"


class HalvingStage(Stage):
    """`points` steps learn twice as many of the teacher's."""

    objective: Literal["halving:HalvingStage"] = "halving:HalvingStage"
    points: int = Field(ge=1, description="steps of the student")
    teacher: str = Field(default="previous", description="the model whose steps are halved")

    def build(self, setting: Setting) -> Halving:
        return Halving(tuple(grid(2 * self.points, *self.span(setting))))

    def describe(self) -> str:
        return f"{2 * self.points} steps become {self.points}"

    def roles(self, setting: Setting) -> dict[str, Role]:
        low, high = self.span(setting)
        return {"teacher": Role("teacher", self.teacher, lowest=low, highest=high, network="source")}

    def rows(self) -> Rows:
        return Rows(gradient=1, plain=2)

    def sampler(self, second_time: float) -> GridSampler:
        return GridSampler(points=self.points)
