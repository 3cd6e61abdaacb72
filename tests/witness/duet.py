"""Two networks that learn in turns: a small Diff-Instruct, as a plug-in."""

from dataclasses import dataclass
from typing import Literal

import torch

from tcm.foundation.randomness import SampleStreams
from tcm.method.objectives import Batch, Losses, Models, Objective, draw
from tcm.method.preconditioning import c_out, column
from tcm.method.sampling import HeunSampler
from tcm.method.times import LogNormal, TimeDistribution
from tcm.recipes.stages import Role, Rows, Setting, Stage, Turn


@dataclass(frozen=True)
class Duet(Objective):
    """The fake: E ‖fake(x_g + tε) − x_g‖²/(d c_out²); the student moves x_g by (fake − teacher)(x_g + tε)/d."""

    times: TimeDistribution

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        drawn, z = draw(self.times, models, batch, streams), streams.normal(batch.x.shape[1:])
        student, fake, teacher = (models[role] for role in ("student", "fake", "teacher"))
        T = torch.full((len(batch.x),), student.t_max, dtype=torch.float64)
        with torch.set_grad_enabled(turn == "student"):
            x_g = student(student.t_max * z, T, batch.condition)
        x_t = x_g.detach() + column(drawn.t, batch.x) * drawn.eps
        if turn == "fake":
            error = (fake(x_t, drawn.t, batch.condition) - x_g).flatten(1).square().mean(1)
            weighted = error / c_out(drawn.t, fake.sigma_data).float() ** 2
        else:
            difference = fake(x_t, drawn.t, batch.condition) - teacher(x_t, drawn.t, batch.condition)
            weighted = (x_g * difference.detach()).flatten(1).mean(1)
        total = weighted.sum() / batch.B
        return Losses(total, {"part": total.detach()}, weighted.detach(), drawn.t)


class DuetStage(Stage):
    """Two networks that learn: the fake in each step, the student in every other."""

    objective: Literal["duet:DuetStage"] = "duet:DuetStage"
    teacher: str = "diffusion"

    def turns(self) -> tuple[Turn, ...]:
        return (Turn("fake"), Turn("student", every=2))

    def build(self, setting: Setting) -> Duet:
        return Duet(LogNormal(-1.2, 1.2).within(*self.span(setting)))

    def describe(self) -> str:
        return "distribution matching"

    def roles(self, setting: Setting) -> dict[str, Role]:
        return {
            "fake": Role("teacher", self.teacher, trained=True, source_sampler=HeunSampler),
            "teacher": Role("teacher", self.teacher, source_sampler=HeunSampler),
        }

    def rows(self) -> Rows:
        return Rows(gradient=2, plain=3)
