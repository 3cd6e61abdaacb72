"""What the recipes of the package need, counted ahead: listing them builds no network, and imports none.

`python -m tcm.recipes.counted` counts again, into counted.json.
"""

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcm.recipes.schema import Recipe

FILE = "counted.json"


def counted() -> dict[str, Any]:
    """What `count` has found: under `recipes`, the smallest first, under `assumption` what GPU-hours are predicted for.

    >>> counted()["recipes"][0]["name"]
    'digits'
    """
    found: dict[str, Any] = json.loads((resources.files("tcm.recipes") / FILE).read_text("utf-8"))
    return found


def count() -> dict[str, Any]:
    """Count parameters, FLOPs and bytes of every stage of the recipes that come with the package."""
    from tcm.recipes.estimates import ASSUMPTION
    from tcm.recipes.resolve import resolve, shipped

    rows = [_row(resolve(name)) for name in shipped()]
    return {"assumption": ASSUMPTION, "recipes": sorted(rows, key=lambda row: row["gpu_hours"])}


def _row(recipe: "Recipe") -> dict[str, Any]:
    from tcm.recipes.estimates import estimate

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
    Path(__file__).with_name(FILE).write_text(json.dumps(count(), indent=1) + "\n", "utf-8")
