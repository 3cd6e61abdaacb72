"""What all stages share, and what each of them says about itself.

A stage owns its consequences: nothing outside its file asks which kind it is.
"""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tcm.foundation.errors import TcmError
from tcm.method.averaging import ConstantDecay, Decay, PowerDecay
from tcm.method.objectives import Objective
from tcm.method.sampling import SamplerName
from tcm.method.times import LogNormal, LogStudentT
from tcm.networks import AnyNetwork
from tcm.recipes.stages.roles import Role, Rows, Turn

CONTINUE: Literal["continue"] = "continue"
"""The schedule_offset of a stage that counts its steps on from those of the stage that it starts from."""


def _offset(value: object) -> object:
    if value == CONTINUE or (type(value) is int and value >= 0):
        return value
    raise ValueError(f'must be a number of steps, 0 or more, or "{CONTINUE}"')


Offset = Annotated[int | Literal["continue"], BeforeValidator(_offset)]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Times = Annotated[LogNormal | LogStudentT, Field(discriminator="kind")]
Average = Annotated[Decay, Field(discriminator="kind")]


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


class Setting(Spec):
    """What the stages of a recipe share."""

    network: AnyNetwork = Field(description="the network")
    sigma_data: Positive = Field(default=0.5, description="standard deviation of the data in [−1, 1]")
    t_min: Positive = Field(default=0.002, description="lowest noise level")
    t_max: float = Field(default=80.0, gt=0, le=1e6, description="highest noise level T, where sampling begins")
    conditional: bool = Field(default=False, description="whether the network is given the data set's labels")
    uncertainty: int = Field(
        default=0, ge=0, description="channels of EDM2's learned uncertainty in diffusion stages; 0: none"
    )


class Stage(Spec):
    """A stage of a run: how it is trained, and what a subclass says about its objective."""

    objective: str = Field(
        description="what the stage minimises: diffusion, consistency, truncated, or a class of your own, module:Class"
    )
    steps: int = Field(gt=0, description="optimiser steps")
    batch: int = Field(gt=0, description="images per step, over all processes and micro-batches")
    accumulation: int = Field(default=1, ge=1, description="micro-batches per step; the result does not depend on it")
    optimizer: Literal["radam", "adam", "adamw"] = Field(default="radam", description="optimiser")
    learning_rate: Positive = Field(description="learning rate; with inverse_sqrt, that of the first steps")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="decay of the optimiser's two moments")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    schedule: Literal["constant", "inverse_sqrt"] = Field(
        default="constant",
        description="learning rate over steps i; inverse_sqrt: divided by √max(i/schedule_reference, 1)",
    )
    schedule_reference: Count | None = Field(default=None, description="step after which inverse_sqrt begins to fall")
    schedule_offset: Offset = Field(
        default=0,
        description="steps that inverse_sqrt and power averages count before this stage's first; "
        "continue: those of the stage that the weights come from",
    )
    warmup: int = Field(default=0, ge=0, description="steps over which the learning rate rises from 0")
    averages: tuple[Average, ...] = Field(
        default=(ConstantDecay(),),
        min_length=1,
        description="averages of the weights; the model folder holds the first",
    )
    precision: Precision = Field(
        default="fp32",
        description="precision of the network's arithmetic; fp32 is IEEE's, fp16 comes with dynamic loss scaling",
    )
    accept_noise: bool = Field(
        default=False, description="train although the precision's rounding drowns the gradient or the pairs"
    )
    clip: Positive | None = Field(default=None, description="largest gradient norm; a larger one is scaled down to it")
    compile: bool = Field(default=False, description="compile the network with torch.compile")
    dropout: Fraction | None = Field(default=None, description="dropout in this stage; unset: the network's")
    init: str = Field(
        default="previous",
        description="where the weights come from: scratch, previous (the stage before; in the first stage --init), "
        "an earlier stage, or a model folder (with a slash)",
    )
    log_every: int = Field(default=50, gt=0, description="steps between lines of metrics.jsonl")
    checkpoint_every: int = Field(default=1000, gt=0, description="steps between checkpoints")
    keep: int = Field(default=2, ge=1, description="checkpoints that are kept")
    sample_every: int = Field(default=1000, ge=0, description="steps between sample grids; 0 for none")
    guard: GuardSpec = Field(default=GuardSpec(), description="what happens when training blows up")

    turns: ClassVar[tuple[Turn, ...]] = (Turn(),)
    """Whose weights move, in this order, within a step."""
    sampler: ClassVar[SamplerName] = "consistency"
    """How the stage's model is sampled."""
    collapse_remedy: ClassVar[str] = "train longer"
    """What to do when all samples of the model look alike."""

    @abstractmethod
    def build(self, setting: Setting) -> Objective:
        """The objective, in the words of `tcm.method`."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for a report."""

    def span(self, setting: Setting) -> tuple[float, float]:
        """The times [low, high] that the stage trains on, and on which its model is defined."""
        return setting.t_min, setting.t_max

    def roles(self, setting: Setting) -> dict[str, Role]:
        """The models that take part, besides the student."""
        return {}

    def rows(self) -> Rows:
        """The network evaluations of a step, for an image."""
        return Rows()

    @property
    def learns_null(self) -> bool:
        """Whether the stage's model is trained on the null condition too."""
        return False

    def card_fields(self, setting: Setting) -> dict[str, Any]:
        """What the stage's model card says beyond what all do."""
        return {}

    def check(self, name: str, setting: Setting) -> None:
        """Refuse keys that do not fit each other, or the rest of the recipe."""
        if self.batch % self.accumulation:
            lower = self.batch // self.accumulation * self.accumulation
            nearest = " or ".join(str(batch) for batch in (lower, lower + self.accumulation) if batch)
            raise TcmError(
                f"{name}.batch={self.batch} is not divisible by accumulation={self.accumulation}; use batch={nearest}"
            )
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
        if self.warmup >= self.steps:
            raise TcmError(f"{name}.warmup={self.warmup} must be less than steps={self.steps}; shorten it")
        counts_steps = self.schedule != "constant" or any(isinstance(decay, PowerDecay) for decay in self.averages)
        if self.schedule_offset != 0 and not counts_steps:
            raise TcmError(
                f"{name}.schedule_offset={self.schedule_offset!r} has no effect on schedule='constant' and constant "
                f"averages; remove it, or use schedule='inverse_sqrt' or a power average"
            )
