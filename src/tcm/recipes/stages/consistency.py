"""Stage 1: consistency training or distillation, and what stage 2 shares with it."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo

from tcm.foundation.errors import KeyInTable, TcmError
from tcm.foundation.plugins import reader_of
from tcm.method.curriculum import Curriculum, Spacing
from tcm.method.distances import WEIGHTINGS, Distance, PseudoHuber, SquaredL2, WeightingName
from tcm.method.objectives import Consistency, Distillation, Pairs, Tangents
from tcm.method.sampling import HeunSampler
from tcm.method.solvers import EVALUATIONS, SOLVERS, SolverName
from tcm.recipes.stages.base import HALF, UNTIL_FLAT, Setting, Stage, Times
from tcm.recipes.stages.optimization import Positive
from tcm.recipes.stages.roles import Role, Rows

DISTANCES: dict[str, type[Distance]] = {"pseudo_huber": PseudoHuber, "squared_l2": SquaredL2}
AnyDistance = Annotated[SerializeAsAny[Distance], BeforeValidator(reader_of(DISTANCES, Distance, "tcm.parts"))]
"""A distance, read by its `kind`: ours, an entry point of `tcm.parts`, or `module:Class`."""
RATIO = Curriculum.kind
read_spacing = reader_of({RATIO: Curriculum}, Spacing, "tcm.parts", usual=RATIO)
AnySpacing = Annotated[SerializeAsAny[Spacing], BeforeValidator(read_spacing)]
"""Δ_t, read in the same way; without a `kind`, the paper's."""

# The names of the defaults of the method.
_WEIGHTING = next(name for name, weighting in WEIGHTINGS.items() if weighting is Pairs.weighting)
_SOLVER = next(name for name, step in SOLVERS.items() if step is Distillation.step)
LONGEST = 4
"""`steps = "until-flat"` ends at the latest after this many times the curriculum's length."""


class PairsStage(Stage):
    """How neighbouring points of a trajectory are made and compared."""

    target: Literal["difference", "tangent"] = Field(
        default="difference",
        description="what f(x_t, t) is compared with: f(x_r, r), or f(x_t, t) − Δ_t df/dt, whose derivative is exact "
        "and survives half precision",
    )
    curriculum: AnySpacing = Field(default=Pairs.curriculum, description="Δ_t, the distance of a pair's times")
    distance: AnyDistance = Field(default=Pairs.distance, description="distance between the two outputs")
    weighting: WeightingName = Field(default=_WEIGHTING, description="weight of a pair: 1/Δ, 1/c_out² or 1")
    teacher: str | None = Field(
        default=None,
        description="diffusion model to distil from: an earlier stage, a model folder (with a slash), or init for "
        "the model given with --init; unset: training from data",
    )
    teacher_precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="precision in which the teacher's weights are stored"
    )
    solver: SolverName = Field(
        default=_SOLVER, description="how the teacher's trajectory is followed; tangents take one evaluation"
    )
    guidance: float = Field(default=Distillation.guidance, description="the teacher's guidance scale; 1 for none")
    label_dropout: float = Field(
        default=Consistency.label_dropout,
        description="probability that the condition is hidden, so that the model also knows the null condition",
    )

    schedule_captions: ClassVar[dict[str, str]] = {
        "ratio": "Ratio r/t of a pair's times: stage 1 raises it step by step, stage 2 holds the limit from the start."
    }

    def spacing(self, setting: Setting) -> Spacing:
        """Δ_t for times from t_min to the end of the stage's range."""
        _, high = self.span(setting)
        return self.curriculum.within(setting.t_min, high)

    def pairs(self, setting: Setting) -> Pairs:
        """All of Eq. 4 but the times."""
        distillation = None if self.teacher is None else Distillation(SOLVERS[self.solver], self.guidance)
        kind = Tangents if self.target == "tangent" else Pairs
        return kind(self.spacing(setting), self.distance, WEIGHTINGS[self.weighting], distillation)

    def roles(self, setting: Setting) -> dict[str, Role]:
        if self.teacher is None:
            return {}
        _, high = self.span(setting)
        unguided = None if self.guidance == 1 else "guidance=1.0"
        teacher = Role(
            "teacher",
            self.teacher,
            source_sampler=HeunSampler,
            highest=high,
            needs_null=unguided,
            network="source",
            precision=self.teacher_precision,
        )
        return {"teacher": teacher}

    def rows(self) -> Rows:
        if self.target == "tangent":
            return Rows(plain=self.evaluations_of_teacher, tangent=1)
        return Rows(plain=1 + self.evaluations_of_teacher)

    @property
    def evaluations_of_teacher(self) -> int:
        """Of its network, per image."""
        if self.teacher is None:
            return 0
        return (1 if self.target == "tangent" else EVALUATIONS[self.solver]) * (1 if self.guidance == 1 else 2)

    @property
    def half(self) -> Literal["autocast", "network"]:
        return "network" if self.target == "tangent" else "autocast"

    @property
    def teacher_guidance(self) -> float:
        return self.guidance

    def null_remedy(self, name: str) -> str | None:
        return None if self.label_dropout else super().null_remedy(name)

    def earliest_end(self) -> int:
        return self.curriculum.length

    def check(self, name: str, setting: Setting) -> None:
        super().check(name, setting)
        self.check_label_dropout(name, self.label_dropout, setting)
        if self.guidance != 1 and self.teacher is None:
            raise TcmError(
                f"{name}.guidance={self.guidance} needs a teacher; name a diffusion stage as teacher or "
                f"set guidance=1.0"
            )
        if self.guidance != 1 and not setting.conditional:
            raise TcmError(f"{name}.guidance={self.guidance} needs conditions; set conditional=true or guidance=1.0")
        if self.half == "network" and self.precision in HALF and not setting.network.computes_in_half:
            raise TcmError(
                f"{name}.precision={self.precision!r} with target='tangent' needs a network that computes in half "
                f"precision, but network.kind={setting.network.kind!r} does not; use precision='fp32'"
            )

    @property
    def how(self) -> str:
        """Training or distillation."""
        what = "consistency training" if self.teacher is None else "consistency distillation"
        return f"{what} by tangents" if self.target == "tangent" else what


class ConsistencyStage(PairsStage):
    """Consistency on the whole range of times."""

    objective: Literal["consistency"] = "consistency"
    times: Times = Field(default=Consistency.times, description="distribution of the training times")
    t_high: Positive | None = Field(default=None, description="where the stage's range ends; unset: at t_max")

    @classmethod
    def written_out(cls, table: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if table.get("steps") != UNTIL_FLAT:
            return table
        try:
            curriculum = read_spacing(table.get("curriculum", {}), info)
        except TcmError:
            curriculum = None
        if not isinstance(curriculum, Spacing):
            return table | {"steps": 1}  # the curriculum's own error is the one to show
        if curriculum.length == 0:
            raise KeyInTable(
                f"steps={UNTIL_FLAT!r} needs curriculum.d above 0; give the bound: steps=1000 and until_flat=true"
            )
        return table | {"steps": LONGEST * curriculum.length, "until_flat": True}

    def span(self, setting: Setting) -> tuple[float, float]:
        return setting.t_min, setting.t_max if self.t_high is None else self.t_high

    def check(self, name: str, setting: Setting) -> None:
        super().check(name, setting)
        if self.t_high is not None and not setting.t_min < self.t_high <= setting.t_max:
            raise TcmError(
                f"{name}.t_high={self.t_high} must lie between t_min={setting.t_min} and t_max={setting.t_max}; "
                f"set it to 'none' to use the whole range"
            )

    def build(self, setting: Setting) -> Consistency:
        return Consistency(self.times.within(*self.span(setting)), self.pairs(setting), self.label_dropout)

    def describe(self) -> str:
        return f"{self.how} at all noise levels"
