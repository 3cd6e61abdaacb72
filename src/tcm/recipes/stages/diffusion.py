"""Stage 0: denoising, as EDM and EDM2 train."""

from typing import Any, Literal

from pydantic import Field

from tcm.method.objectives import Diffusion
from tcm.method.sampling import HeunSampler
from tcm.recipes.stages.base import Setting, Stage, Times


class DiffusionStage(Stage):
    """Denoising score matching at all noise levels: EDM's loss."""

    objective: Literal["diffusion"] = "diffusion"
    times: Times = Field(default=Diffusion.times, description="distribution of the training times")
    label_dropout: float = Field(
        default=Diffusion.label_dropout, description="probability that the condition is hidden, for guidance"
    )

    def build(self, setting: Setting) -> Diffusion:
        return Diffusion(self.times.within(*self.span(setting)), self.label_dropout)

    def check(self, name: str, setting: Setting) -> None:
        super().check(name, setting)
        self.check_label_dropout(name, self.label_dropout, setting)

    def sampler(self, second_time: float) -> HeunSampler:
        return HeunSampler()

    def null_remedy(self, name: str) -> str | None:
        return None if self.label_dropout else f"set {name}.label_dropout=0.1"

    def card_fields(self, setting: Setting) -> dict[str, Any]:
        return {"uncertainty": setting.uncertainty}

    def describe(self) -> str:
        return "denoising at all noise levels"
