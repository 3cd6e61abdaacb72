"""What the folder of a run looks like."""

from pathlib import Path

from tcm.recipes.schema import Recipe
from tcm.weights import RECIPE_FILE, is_run, stages_elsewhere

__all__ = ["RECIPE_FILE", "SCORES_FILE", "run_of", "stage_folders"]

SCORES_FILE = "scores.jsonl"


def stage_folders(recipe: Recipe, run: Path) -> dict[str, Path]:
    """The folder of each stage: 0-diffusion, 1-consistency, 2-truncated; without stage 0 the count begins at 1.

    Stage 0 is one whose model needs many steps to make an image. A run of a study shares its stages with other runs,
    and says where they are.
    """
    elsewhere = stages_elsewhere(run)
    first = int(next(iter(recipe.stages.values())).sampler(recipe.second_time).generates_at_once)
    own = {name: run / f"{number}-{name}" for number, name in enumerate(recipe.stages, start=first)}
    return {name: elsewhere.get(name, folder) for name, folder in own.items()}


def run_of(folder: Path) -> Path | None:
    """The run whose folder this is, or to which the folder of a stage or of a stage's model belongs."""
    inside = folder.name == "model" or (folder / "model").is_dir()
    around = list(folder.absolute().parents[:2]) if inside else []
    return next((one for one in [*reversed(around), folder] if is_run(one)), None)
