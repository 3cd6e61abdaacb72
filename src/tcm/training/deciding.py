"""What a run decides when a stage begins."""

from pathlib import Path

from tcm.recipes.decided import note_decision
from tcm.recipes.folders import stage_folders
from tcm.recipes.lineage import roles_of, source_stage
from tcm.recipes.schema import Recipe
from tcm.training.metrics import METRICS_FILE, read_metrics
from tcm.training.watching import read_curves


def decide(recipe: Recipe, name: str, run: Path) -> None:
    """Decide what the recipe leaves open about a stage that is about to begin, by the curves of an earlier one.

    A stage that has begun keeps what was decided then: the earlier one may have been extended since.
    """
    folders = stage_folders(recipe, run)
    if any((folders[name] / "state").glob("step-*")):
        return
    for role in roles_of(recipe, name).values():
        source = source_stage(recipe, name, role)
        if role.needs_curves is None or source is None:
            continue
        metrics = folders[source] / METRICS_FILE
        curves = read_curves(read_metrics(metrics)) if metrics.is_file() else {}
        decision = recipe.stages[name].decide(recipe, curves)
        if decision is not None:
            note_decision(folders[name], decision)
