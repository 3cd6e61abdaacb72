"""A stage whose loss fails in one process: FAIL holds its rank, the exception and when: "1 OSError planning"."""

import builtins
import os
import time
from dataclasses import dataclass
from typing import Literal

import torch
from launching import tiny_recipe

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.objectives import Batch, Diffusion, Losses, Models
from tcm.method.times import LogNormal
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Setting, Stage


def fail(moment: str) -> None:
    """Fail if this is the process and the moment for it; with BUSY the others compute for ever meanwhile."""
    rank, name, when = os.environ["FAIL"].split()
    if moment == when and rank == os.environ.get("RANK", "0"):
        raise (
            TcmError("luck=bad; use good")
            if name == "TcmError"
            else (getattr(builtins, name, None) or getattr(torch, name))("bad luck")
        )
    if moment == when and "BUSY" in os.environ:
        time.sleep(600)


@dataclass(frozen=True)
class Failing(Diffusion):
    """The diffusion model's loss, which fails in the third step."""

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        if step == 2:
            fail("training")
        return super().loss(models, batch, step, streams, turn)


class FailingStage(Stage):
    """A stage with that loss; or it fails when the run is planned."""

    objective: Literal["failing:FailingStage"] = "failing:FailingStage"

    def check(self, name: str, setting: Setting) -> None:
        super().check(name, setting)
        fail("planning")

    def build(self, setting: Setting) -> Failing:
        return Failing(LogNormal(-1.2, 1.2).within(*self.span(setting)))

    def describe(self) -> str:
        return "denoising that fails"


def failing_recipe() -> Recipe:
    """A recipe of that stage alone."""
    base = tiny_recipe(4)
    stage = FailingStage(init="scratch", steps=4, batch=16, optimizer="adam", learning_rate=1e-3, sample_every=0)
    known = {key: getattr(base, key) for key in base.model_fields_set}
    return Recipe.model_construct(**known | {"stages": {"failing": stage}})
