"""How a network's weights are trained: the stage's keys for it, which a role may set for itself."""

from math import sqrt
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from tcm.foundation.errors import TcmError
from tcm.method.averaging import ConstantDecay, PowerDecay

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
AnyDecay = Annotated[ConstantDecay | PowerDecay, Field(discriminator="kind")]


OnResume = Literal["free", "longer", "same content"]


def on_resume(rule: OnResume) -> dict[str, JsonValue]:
    """What a resumed run may change about a key, for a field's `json_schema_extra`; without it: nothing.

    `free`: anything, for the weights do not depend on it but for rounding. `longer`: it may grow. `same content`: the
    path of data that are the same.
    """
    return {"on_resume": rule}


class Spec(BaseModel):
    """A part of a recipe: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GuardSpec(Spec):
    """What happens at a non-finite loss or a gradient far beyond its running scale."""

    on: bool = Field(default=True, description="skip such updates, go back to a checkpoint if they persist")
    spike: float = Field(
        default=20.0, gt=1, description="a gradient norm above this multiple of its running value is a spike"
    )
    patience: int = Field(default=10, ge=1, description="skips in a row before returning to the last good checkpoint")
    retries: int = Field(default=3, ge=0, description="times to go back, each with other noise, before the run stops")


class Optimization(Spec):
    """How the weights of a network are trained."""

    optimizer: Literal["radam", "adam", "adamw"] = Field(default="radam", description="optimiser")
    learning_rate: Positive = Field(description="learning rate; with inverse_sqrt, that of the first steps")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="decay of the optimiser's two moments")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    schedule: Literal["constant", "inverse_sqrt"] = Field(
        default="constant",
        description="learning rate over steps i; inverse_sqrt: divided by √max(i/schedule_reference, 1)",
    )
    schedule_reference: Count | None = Field(default=None, description="step after which inverse_sqrt begins to fall")
    warmup: int = Field(default=0, ge=0, description="steps over which the learning rate rises from 0")
    averages: tuple[AnyDecay, ...] = Field(
        default=(ConstantDecay(),),
        min_length=1,
        description="averages of the weights; the model folder holds the first",
    )
    clip: Positive | None = Field(default=None, description="largest gradient norm; a larger one is scaled down to it")
    guard: GuardSpec = Field(default=GuardSpec(), description="what happens when training blows up")

    def rate(self, step: int, offset: int = 0) -> float:
        """The learning rate: α_ref/√max(i/i_ref, 1) with the inverse-square-root schedule, after a linear warm-up.
        TCM App. F.

        The stage's steps count from 0; the schedule counts `offset` steps before them.
        """
        rate = self.learning_rate
        if self.schedule == "inverse_sqrt" and self.schedule_reference is not None:
            rate /= sqrt(max((offset + step) / self.schedule_reference, 1))
        return rate * ((step + 1) / self.warmup) if step < self.warmup else rate

    def check_optimization(self, name: str, steps: int) -> None:
        """Refuse keys that do not fit each other, or the number of steps."""
        if self.schedule == "inverse_sqrt" and self.schedule_reference is None:
            raise TcmError(
                f"{name}.schedule='inverse_sqrt' needs schedule_reference, the step after which the learning rate "
                f"falls; add it, such as schedule_reference=2000"
            )
        if self.schedule == "constant" and self.schedule_reference is not None:
            raise TcmError(
                f"{name}.schedule_reference={self.schedule_reference} has no effect on schedule='constant'; "
                f"use schedule='inverse_sqrt' or schedule_reference='none'"
            )
        if self.warmup >= steps:
            raise TcmError(f"{name}.warmup={self.warmup} must be less than steps={steps}; shorten it")
