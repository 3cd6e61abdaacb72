"""What the folder of a run looks like."""

from pathlib import Path

from tcm.recipes.schema import Recipe

RECIPE_FILE, SCORES_FILE = "recipe.toml", "scores.jsonl"


def stage_folders(recipe: Recipe, run: Path) -> dict[str, Path]:
    """The folder of each stage: 0-diffusion, 1-consistency, 2-truncated; without stage 0 the count begins at 1."""
    first = 0 if next(iter(recipe.stages.values())).sampler == "heun" else 1
    return {name: run / f"{number}-{name}" for number, name in enumerate(recipe.stages, start=first)}
