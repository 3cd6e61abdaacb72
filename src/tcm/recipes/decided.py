"""What a run decides about its own recipe: how long a stage trains, where the next begins."""

from pathlib import Path

from pydantic import ValidationError

from tcm.foundation.errors import describe_validation
from tcm.foundation.files import atomic_write, read_record
from tcm.recipes.folders import stage_folders
from tcm.recipes.schema import Recipe
from tcm.recipes.stages.base import Decision

DECIDED_FILE = "decided.json"
"""In a stage's folder: the values of keys that its recipe leaves to the run."""


def note_decision(stage: Path, decision: Decision) -> None:
    """Write down what was decided about a stage."""
    with atomic_write(stage / DECIDED_FILE) as file:
        file.write(decision.model_dump_json(indent=2).encode() + b"\n")


def noted_decision(stage: Path) -> Decision | None:
    """What was decided about a stage so far."""
    path = stage / DECIDED_FILE
    try:
        return Decision.model_validate_json(read_record(path)) if path.exists() else None
    except ValidationError as error:
        raise describe_validation(error, str(path)) from error


def settled(recipe: Recipe, run: Path) -> Recipe:
    """The recipe with what a run has decided in place of what its recipe leaves open.

    Two sampling steps never begin their second below a t' that was chosen.
    """
    stages = dict(recipe.stages)
    for name, folder in stage_folders(recipe, run).items():
        stage, decision = stages[name], noted_decision(folder)
        if decision is not None:
            open_keys = stage.undecided()
            stages[name] = stage.with_decided({k: v for k, v in decision.values.items() if k in open_keys})
    if stages == recipe.stages:
        return recipe
    lowest = max(stage.span(recipe)[0] for stage in stages.values())
    return recipe.model_copy(update={"stages": stages, "second_time": max(recipe.second_time, lowest)})
