"""The stages that a run can have: each in its own file, listed here."""

from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, ValidationInfo

from tcm.foundation.plugins import Trust, find_class, read_table
from tcm.recipes.stages.base import Setting, Stage, Times
from tcm.recipes.stages.consistency import ConsistencyStage, PairsStage
from tcm.recipes.stages.diffusion import DiffusionStage
from tcm.recipes.stages.optimization import GuardSpec, Optimization, Spec
from tcm.recipes.stages.roles import Role, Rows, Turn
from tcm.recipes.stages.truncated import TruncatedStage

__all__ = [
    "STAGES",
    "AnyStage",
    "GuardSpec",
    "Optimization",
    "PairsStage",
    "Role",
    "Rows",
    "Setting",
    "Spec",
    "Stage",
    "Times",
    "Turn",
    "stage_class",
]

STAGES: dict[str, type[Stage]] = {
    "diffusion": DiffusionStage,
    "consistency": ConsistencyStage,
    "truncated": TruncatedStage,
}


def stage_class(objective: str, trust: Trust) -> type[Stage]:
    """The stage of an objective: one of ours, an entry point of the group `tcm.objectives`, or `module:Class`."""
    return find_class("objective", objective, STAGES, Stage, "tcm.objectives", trust)


def _read(table: Any, info: ValidationInfo) -> Any:
    trust: Trust = info.context or False
    if isinstance(table, dict) and isinstance(table.get("objective"), str):
        table = stage_class(table["objective"], trust).written_out(table, info)
    return read_table(table, "objective", lambda objective: stage_class(objective, trust), trust)


AnyStage = Annotated[SerializeAsAny[Stage], BeforeValidator(_read)]
"""A stage, read from a table by its `objective`."""
