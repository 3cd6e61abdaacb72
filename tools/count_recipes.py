"""Count what the recipes of the package need: `python tools/count_recipes.py` writes src/tcm/recipes/counted.json."""

import json
from pathlib import Path
from typing import Any

import tcm.recipes
from tcm.recipes.estimates import ASSUMPTION, estimate
from tcm.recipes.resolve import resolve, shipped
from tcm.recipes.schema import Recipe


def count() -> dict[str, Any]:
    """Count parameters, FLOPs and bytes of every stage of the recipes that come with the package."""
    rows = [_row(resolve(name)) for name in shipped()]
    return {"assumption": ASSUMPTION, "recipes": sorted(rows, key=lambda row: row["gpu_hours"])}


def _row(recipe: Recipe) -> dict[str, Any]:
    costs = {name: estimate(recipe, stage) for name, stage in recipe.stages.items()}
    return {
        "name": recipe.name,
        "image_shape": recipe.image_shape and list(recipe.image_shape),
        "conditional": recipe.conditional,
        "gpu_hours": sum(cost.gpu_hours for cost in costs.values()),
        "stages": {
            name: {
                "batch": recipe.stages[name].batch,
                "steps": recipe.stages[name].steps,
                "parameters": cost.parameters,
                "rows": {"gradient": cost.rows.gradient, "tangent": cost.rows.tangent, "plain": cost.rows.plain},
                "step_flops": cost.step_flops,
                "state_bytes": cost.memory.state,
                "bytes_per_image": cost.activations_per_image,
                "gpu_hours": cost.gpu_hours,
            }
            for name, cost in costs.items()
        },
    }


if __name__ == "__main__":
    file = Path(tcm.recipes.__path__[0], "counted.json")
    file.write_text(json.dumps(count(), indent=1) + "\n", "utf-8")
