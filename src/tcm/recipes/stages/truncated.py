"""Stage 2: truncated consistency on [t', T]."""

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from tcm.foundation.errors import TcmError
from tcm.method.curriculum import Curriculum
from tcm.method.objectives import TruncatedConsistency
from tcm.method.sampling import ConsistencySampler
from tcm.method.times import LogStudentT
from tcm.recipes.stages.base import Setting, Times
from tcm.recipes.stages.consistency import PairsStage
from tcm.recipes.stages.optimization import Positive, Spec
from tcm.recipes.stages.roles import Role, Rows

# pydantic accepts no config for a plain dataclass, and without one it ignores unknown keys.
_CURRICULUM = TypeAdapter(Curriculum | None, config=Spec.model_config)


def _at_its_limit(table: Any) -> Any:
    """A curriculum that leaves d out is at its limit throughout: what the paper does in stage 2."""
    if not isinstance(table, dict):
        return table
    return _CURRICULUM.validate_json(json.dumps({"d": TruncatedConsistency.pairs.curriculum.d} | table), strict=True)


class TruncatedStage(PairsStage):
    """Consistency on [t_prime, t_max]; the frozen model of the stage before gives the boundary condition."""

    objective: Literal["truncated"] = "truncated"
    times: Times = Field(default=LogStudentT(0.0, 0.2), description="distribution of the training times")
    curriculum: Annotated[Curriculum, BeforeValidator(_at_its_limit)] = Field(
        default=TruncatedConsistency.pairs.curriculum,
        description="Δ_t, the distance of a pair's times; with d = 0 at its limit throughout",
    )
    t_prime: Positive = Field(
        default=TruncatedConsistency.t_prime,
        description="t', the dividing time, where the frozen model gives the target",
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

    collapse_remedy: ClassVar[str] = "raise w_b or rho"

    def span(self, setting: Setting) -> tuple[float, float]:
        return self.t_prime, setting.t_max

    def forgets_below(self, setting: Setting) -> float:
        low, _ = self.span(setting)
        return low

    def check(self, name: str, setting: Setting) -> None:
        super().check(name, setting)
        if not setting.t_min < self.t_prime < setting.t_max:
            raise TcmError(
                f"{name}.t_prime={self.t_prime} must lie between t_min={setting.t_min} and t_max={setting.t_max}; "
                f"the paper uses 1.0"
            )

    def build(self, setting: Setting) -> TruncatedConsistency:
        objective = TruncatedConsistency(
            self.times.within(*self.span(setting)), self.pairs(), self.t_prime, self.w_b, self.rho
        )
        objective.boundary_count(self.batch)
        return objective

    def roles(self, setting: Setting) -> dict[str, Role]:
        frozen = Role(
            "frozen",
            self.frozen,
            sampler=ConsistencySampler,
            lowest=self.curriculum.earliest(self.t_prime),
            highest=self.t_prime,
            precision=self.frozen_precision,
        )
        return super().roles(setting) | {"frozen": frozen}

    def rows(self) -> Rows:
        return replace(super().rows(), idle=1)  # f^trunc calls student and frozen model, rows or none

    def describe(self) -> str:
        return f"{self.how} above t′ = {self.t_prime:g}"
