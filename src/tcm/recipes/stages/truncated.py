"""Stage 2: truncated consistency on [t', T]."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo

from tcm.foundation.errors import TcmError
from tcm.method.curriculum import Spacing
from tcm.method.objectives import TruncatedConsistency
from tcm.method.sampling import ConsistencySampler
from tcm.method.times import LogStudentT
from tcm.recipes.stages.base import AUTO, Decision, Setting, Times
from tcm.recipes.stages.consistency import RATIO, PairsStage, read_spacing
from tcm.recipes.stages.flattening import Curves, is_flat
from tcm.recipes.stages.roles import Role, Rows


def _at_its_limit(table: Any, info: ValidationInfo) -> Any:
    """A curriculum that leaves d out is at its limit throughout: what the paper does in stage 2."""
    if isinstance(table, dict) and table.get("kind", RATIO) == RATIO:
        table = {"d": 0} | table
    return read_spacing(table, info)


def _t_prime(value: object) -> object:
    if value == AUTO or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f'must be a number above 0, or "{AUTO}"')


TPrime = Annotated[float | Literal["auto"], BeforeValidator(_t_prime)]
WATCHED = (0.5, 1.0, 2.0)
"""The times around t' at which the frozen model is watched, in units of t'."""
LARGEST = 1.5
"""In units of sigma_data, the largest t' that is chosen automatically. The paper's is 2 on CIFAR-10; on the digits
(one seed) 1.3 was best, 2 and 4 were worse although the frozen model's dFID had flattened there."""


class TruncatedStage(PairsStage):
    """Consistency on [t_prime, t_max]; the frozen model of the stage before gives the boundary condition."""

    objective: Literal["truncated"] = "truncated"
    times: Times = Field(default=LogStudentT(0.0, 0.2), description="distribution of the training times")
    curriculum: Annotated[SerializeAsAny[Spacing], BeforeValidator(_at_its_limit)] = Field(
        default=TruncatedConsistency.pairs.curriculum,
        description="Δ_t, the distance of a pair's times; with d = 0 at its limit throughout",
    )
    t_prime: TPrime = Field(
        default=TruncatedConsistency.t_prime,
        description="t', the dividing time, where the frozen model gives the target; auto: chosen when the stage "
        "begins, by how the frozen model learned to denoise, and the unit of `times`",
    )
    w_b: float = Field(default=TruncatedConsistency.w_b, description="weight of the boundary loss")
    rho: float = Field(default=TruncatedConsistency.rho, description="ρ, share of the batch that sits at t_prime")
    frozen: str = Field(
        default="previous",
        description="the consistency model below t_prime: previous (the stage before; in the first stage --init), "
        "an earlier stage, or a model folder (with a slash)",
    )
    frozen_precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="precision in which the frozen model's weights are stored"
    )

    companion: bool = Field(
        default=False,
        description="save the frozen model with this stage's, as the companion that samples at t_prime and below",
    )

    collapse_remedy: ClassVar[str] = "raise w_b or rho"

    def dividing_time(self, setting: Setting) -> float:
        """t'; where it is left to the run, the largest that may be chosen."""
        return min(LARGEST * setting.sigma_data, setting.t_max / 5) if self.t_prime == "auto" else self.t_prime

    def span(self, setting: Setting) -> tuple[float, float]:
        return self.dividing_time(setting), setting.t_max

    def watched(self, setting: Setting) -> tuple[float, ...]:
        """t' and times around it, at each of which the stage could begin."""
        times = (factor * self.dividing_time(setting) for factor in WATCHED)
        return tuple(t for t in times if setting.t_min <= self.spacing(setting).earliest(t) and t < setting.t_max)

    def with_decided(self, values: Mapping[str, Any]) -> Self:
        """A t' that was left to the run is the unit of the training times."""
        unit = values.get("t_prime", 1.0)
        return super().with_decided({**values, "times": self.times.in_units_of(unit)})

    def undecided(self) -> set[str]:
        return super().undecided() | ({"t_prime"} if self.t_prime == AUTO else set())

    def decide(self, setting: Setting, curves: Curves) -> Decision | None:
        """The largest watched time up to `dividing_time` at which the frozen model's curve is flat, or the smallest."""
        if self.t_prime != AUTO:
            return None
        largest = self.dividing_time(setting)
        times = sorted(t for t in self.watched(setting) if t in curves and t <= largest)
        if not times:
            raise TcmError(
                f"t_prime={AUTO!r} needs the distances that are measured while the frozen model is trained, but there "
                f"are none; set t_prime={largest:g}"
            )
        flat = [t for t in times if is_flat(curves[t])]
        if flat:
            reason = f"t_prime is {flat[-1]:g}, where the frozen model's denoising has flattened"
            reason += "" if flat[-1] == times[-1] else f" (unlike at {times[-1]:g})"
            return Decision(values={"t_prime": flat[-1]}, reason=reason)
        reason = (
            f"t_prime is {times[0]:g}, but the frozen model's denoising has flattened at none of "
            f"{', '.join(f'{t:g}' for t in times)}; train it longer"
        )
        return Decision(values={"t_prime": times[0]}, reason=reason, doubtful=True)

    def covered(self, setting: Setting) -> tuple[float, float]:
        low, high = self.domain(setting)
        return setting.t_min if self.companion else low, high

    @property
    def companion_role(self) -> str | None:
        return "frozen" if self.companion else None

    def forgets_below(self, setting: Setting) -> float:
        low, _ = self.span(setting)
        return low

    def check(self, name: str, setting: Setting) -> None:
        super().check(name, setting)
        if self.t_prime == "auto":
            for t in self.watched(setting):
                try:
                    self.with_decided({"t_prime": t}).build(setting)
                except TcmError as error:
                    raise TcmError(f"{name}.t_prime='auto' may become {t:g}, but then {error}") from error
        elif not setting.t_min < self.t_prime < setting.t_max:
            raise TcmError(
                f"{name}.t_prime={self.t_prime} must lie between t_min={setting.t_min} and t_max={setting.t_max}; "
                f"the paper uses 1.0"
            )

    def build(self, setting: Setting) -> TruncatedConsistency:
        t_prime, high = self.span(setting)
        if self.t_prime == AUTO:
            return self.with_decided({"t_prime": t_prime}).build(setting)
        times, pairs = self.times.within(t_prime, high), self.pairs(setting)
        objective = TruncatedConsistency(times, pairs, t_prime, self.w_b, self.rho, self.label_dropout)
        objective.boundary_count(self.batch)
        return objective

    def roles(self, setting: Setting) -> dict[str, Role]:
        t_prime = self.dividing_time(setting)
        frozen = Role(
            "frozen",
            self.frozen,
            source_sampler=ConsistencySampler,
            lowest=self.spacing(setting).earliest(t_prime),
            highest=t_prime,
            watched=self.watched(setting),
            needs_curves=f"t_prime={t_prime:g}" if self.t_prime == AUTO else None,
            precision=self.frozen_precision,
        )
        return super().roles(setting) | {"frozen": frozen}

    def rows(self) -> Rows:
        if self.target == "tangent":  # the frozen model takes the boundary samples, tangent and teacher the others
            others, teacher = 1 - self.rho, self.evaluations_of_teacher
            return Rows(plain=self.rho + others * teacher, tangent=others, idle=1 + self.rho * teacher)
        return replace(super().rows(), idle=1)  # f^trunc calls student and frozen model, rows or none

    def describe(self) -> str:
        chosen = ", which is still to be chosen" if self.t_prime == AUTO else f" = {self.t_prime:g}"
        return f"{self.how} above t′{chosen}"
