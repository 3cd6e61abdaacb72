"""What the folder of a run looks like."""

from pathlib import Path

from tcm.recipes.schema import Recipe

RECIPE_FILE, SCORES_FILE = "recipe.toml", "scores.jsonl"


def stage_folders(recipe: Recipe, run: Path) -> dict[str, Path]:
    """The folder of each stage: 0-diffusion, 1-consistency, 2-truncated; without stage 0 the count begins at 1.

    Stage 0 is one whose model needs many steps to make an image.
    """
    first = int(next(iter(recipe.stages.values())).sampler(recipe.second_time).generates_at_once)
    return {name: run / f"{number}-{name}" for number, name in enumerate(recipe.stages, start=first)}
