"""What all stages share, and what each of them says about itself.

A stage owns its consequences: nothing outside its file asks which kind it is.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, SerializeAsAny, ValidationInfo

from tcm.foundation.errors import TcmError
from tcm.foundation.plugins import reader_of
from tcm.method.averaging import PowerDecay
from tcm.method.objectives import Objective
from tcm.method.preconditioning import USUAL
from tcm.method.sampling import ConsistencySampler, Sampler
from tcm.method.times import LogNormal, LogStudentT, TimeDistribution
from tcm.networks import AnyNetwork
from tcm.networks.base import Dropout
from tcm.recipes.stages.flattening import Curves
from tcm.recipes.stages.optimization import Optimization, Spec, on_resume
from tcm.recipes.stages.roles import Role, Rows, Turn
from tcm.weights.card import AnyPreconditioning, HighestTime, LowestTime, SigmaData

UNTIL_FLAT, AUTO = "until-flat", "auto"
"""Words for a number that the run decides."""
CONTINUE: Literal["continue"] = "continue"
"""The schedule_offset of a stage that continues the step count of the stage it starts from."""


def _offset(value: object) -> object:
    if value == CONTINUE or (type(value) is int and value >= 0):
        return value
    raise ValueError(f'must be a number of steps, 0 or more, or "{CONTINUE}"')


Offset = Annotated[int | Literal["continue"], BeforeValidator(_offset)]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
HALF: tuple[Precision, ...] = ("bf16", "fp16")

TIMES: dict[str, type[TimeDistribution]] = {"lognormal": LogNormal, "logstudentt": LogStudentT}
Times = Annotated[SerializeAsAny[TimeDistribution], BeforeValidator(reader_of(TIMES, TimeDistribution, "tcm.parts"))]
"""A distribution of times, read by its `kind`: ours, an entry point of `tcm.parts`, or `module:Class`."""


class Setting(Spec):
    """What the stages of a recipe share."""

    network: AnyNetwork = Field(description="the network")
    sigma_data: SigmaData = Field(default=0.5, description="standard deviation of the data in [−1, 1]")
    t_min: LowestTime = Field(default=0.002, description="lowest noise level")
    t_max: HighestTime = Field(default=80.0, description="highest noise level T, where sampling begins")
    preconditioning: AnyPreconditioning = Field(
        default=USUAL,
        description="how f is built from the network: as in EDM, or as in CM, where f(x, ε) = x",
    )
    conditional: bool = Field(
        default=False,
        description="whether the network is conditioned on the images' classes or other annotations",
    )
    uncertainty: int = Field(
        default=0, ge=0, description="channels of EDM2's learned uncertainty in diffusion stages; 0: none"
    )


class Decision(Spec):
    """What a run decided about a stage: values of its keys, and why; a doubtful one is a warning."""

    values: dict[str, JsonValue]
    reason: str
    doubtful: bool = False


class Stage(Optimization):
    """A stage of a run: how it is trained, and what a subclass says about its objective."""

    objective: str = Field(
        description="what the stage minimises: diffusion, consistency, truncated, or your own class, module:Class"
    )
    steps: int = Field(
        gt=0,
        description='optimiser steps; "until-flat" in a consistency stage: four times as many as the curriculum takes '
        "to its limit, and until_flat = true",
        json_schema_extra=on_resume("longer"),
    )
    until_flat: bool = Field(
        default=False,
        description="end the stage before `steps`, once it no longer gets better at denoising at the t_prime of the "
        "stage that keeps its model frozen",
    )
    watched_images: int = Field(
        default=256,
        ge=0,
        description="images whose denoising is measured, if a later stage keeps the model frozen; 0: not measured",
    )
    batch: int = Field(gt=0, description="images per step, over all processes and micro-batches")
    accumulation: int = Field(
        default=1,
        ge=1,
        description="micro-batches per step; the result does not depend on it",
        json_schema_extra=on_resume("free"),
    )
    schedule_offset: Offset = Field(
        default=0,
        description="steps that inverse_sqrt and power averages count before this stage's first; "
        "continue: those of the stage that the weights come from",
    )
    precision: Precision = Field(
        default="fp32",
        description="precision of the network's arithmetic; fp32 is IEEE's, fp16 comes with dynamic loss scaling",
    )
    accept_rounding: bool = Field(
        default=False, description="train even if rounding error swamps the gradient or the pair differences"
    )
    compile: bool = Field(default=False, description="compile the network with torch.compile")
    dropout: Dropout | None = Field(default=None, description="dropout in this stage; unset: the network's")
    init: str = Field(
        default="previous",
        description="where the weights come from: scratch, previous (the stage before; in the first stage --init), "
        "an earlier stage, or a model folder (with a slash)",
    )
    log_every: int = Field(
        default=50, gt=0, description="steps between lines of metrics.jsonl", json_schema_extra=on_resume("free")
    )
    checkpoint_every: int = Field(
        default=1000, gt=0, description="steps between checkpoints", json_schema_extra=on_resume("free")
    )
    keep: int = Field(default=2, ge=1, description="checkpoints that are kept", json_schema_extra=on_resume("free"))
    sample_every: int = Field(
        default=1000, ge=0, description="steps between sample grids; 0 for none", json_schema_extra=on_resume("free")
    )
    baseline: bool = Field(
        default=False, description="trained for comparison: a report does not show its model as the run's result"
    )

    collapse_remedy: ClassVar[str] = "train longer"
    """What to do when all samples of the model look alike."""
    schedule_captions: ClassVar[dict[str, str]] = {}
    """Captions for the report of what the objective's `schedule` gives, by its names."""

    @abstractmethod
    def build(self, setting: Setting) -> Objective:
        """The objective, in the words of `tcm.method`."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for a report."""

    def span(self, setting: Setting) -> tuple[float, float]:
        """The times [low, high] that the stage trains on."""
        return setting.t_min, setting.t_max

    def start(self, setting: Setting) -> float | None:
        """Where sampling begins, and the model's range ends; None if the model does not generate.

        By default a stage that ends below T has learnt nothing about pure noise, and does not generate.
        """
        _, high = self.span(setting)
        return high if high == setting.t_max else None

    def domain(self, setting: Setting) -> tuple[float, float]:
        """The times [low, high] on which the stage's model is defined."""
        (low, high), start = self.span(setting), self.start(setting)
        return low, high if start is None else start

    def forgets_below(self, setting: Setting) -> float | None:
        """t', below which the stage's model may forget how to denoise; None if it may not."""
        return None

    def sampler(self, second_time: float) -> Sampler:
        """How the stage's model is sampled; `second_time` is the recipe's."""
        return ConsistencySampler(second_time=second_time)

    def covered(self, setting: Setting) -> tuple[float, float]:
        """The times [low, high] on which the stage's model is defined together with its companion, if it has one."""
        return self.domain(setting)

    @property
    def companion_role(self) -> str | None:
        """The role whose model is saved with the stage's, as its companion."""
        return None

    def roles(self, setting: Setting) -> dict[str, Role]:
        """The models that take part besides the student, or "student" itself if it differs from the default."""
        return {}

    def turns(self) -> tuple[Turn, ...]:
        """Whose weights move, in this order, within a step."""
        return (Turn(),)

    @property
    def half(self) -> Literal["autocast", "network"]:
        """How a step computes in 16 bits: layer by layer under autocast, or the whole network."""
        return "autocast"

    def rows(self) -> Rows:
        """The network evaluations of a step, per image."""
        return Rows()

    @property
    def teacher_guidance(self) -> float:
        """The guidance scale of the diffusion model that it follows; 1 if there is none."""
        return 1.0

    def null_remedy(self, name: str) -> str | None:
        """What to do so that the stage's model knows the null condition, which guidance needs; None if it does."""
        return "name another model"

    def card_fields(self, setting: Setting) -> dict[str, Any]:
        """Fields of the stage's model card that differ from the defaults, such as `extra`, which is free to use."""
        return {}

    @classmethod
    def written_out(cls, table: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """The stage's table in a recipe, with words that stand for several keys replaced by these."""
        return table

    def earliest_end(self) -> int:
        """The step before which `until_flat` does not end the stage."""
        return 0

    def undecided(self) -> set[str]:
        """The keys that are left to the run: it decides them when the stage begins or ends."""
        return {"steps", "until_flat"} if self.until_flat else set()

    def with_decided(self, values: Mapping[str, Any]) -> Self:
        """The stage with values of keys that were left to the run."""
        return self.model_copy(update=dict(values))

    def decide(self, setting: Setting, curves: Curves) -> Decision | None:
        """What is decided when the stage begins, by how the model that it keeps frozen learned to denoise."""
        return None

    def check(self, name: str, setting: Setting) -> None:
        """Refuse keys that do not fit each other, or the rest of the recipe."""
        if self.batch % self.accumulation:
            lower = self.batch // self.accumulation * self.accumulation
            nearest = " or ".join(str(batch) for batch in (lower, lower + self.accumulation) if batch)
            raise TcmError(
                f"{name}.batch={self.batch} is not divisible by accumulation={self.accumulation}; use batch={nearest}"
            )
        self.check_optimization(name, self.steps)
        counts_steps = self.schedule != "constant" or any(isinstance(decay, PowerDecay) for decay in self.averages)
        if self.schedule_offset != 0 and not counts_steps:
            raise TcmError(
                f"{name}.schedule_offset={self.schedule_offset!r} has no effect on schedule='constant' and constant "
                f"averages; remove it, or use schedule='inverse_sqrt' or a power average"
            )

    def check_label_dropout(self, name: str, share: float, setting: Setting) -> None:
        """Refuse to hide conditions that there are not."""
        if share and not setting.conditional:
            raise TcmError(f"{name}.label_dropout={share} needs conditions; set conditional=true or label_dropout=0.0")
