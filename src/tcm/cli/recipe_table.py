"""The recipes of the package, as a table."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table

from tcm.cli.amounts import amount, evaluations, millions, thousands
from tcm.foundation.files import byte_size


def recipe_table(recipes: Iterable[dict[str, Any]]) -> Table:
    """A row for each recipe that was counted."""
    table = Table(title="Recipes (memory and GPU-hours are estimates)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify = "left"
    for column in ("recipe, network", "stages: batch×steps", "rows", "memory", "GPU-h"):
        table.add_column(column, justify="right" if column == "GPU-h" else "left", no_wrap=True)
    for recipe in recipes:
        stages = recipe["stages"]
        largest = max(stages.values(), key=lambda stage: stage["state_bytes"])
        table.add_row(
            f"{recipe['name']}\n{millions(largest['parameters'])} {'×'.join(map(str, recipe['image_shape']))}",
            "\n".join(f"{name} {stage['batch']}×{thousands(stage['steps'])}" for name, stage in stages.items()),
            "\n".join(evaluations(**stage["rows"]) for stage in stages.values()),
            f"{byte_size(largest['state_bytes'])}\n+ {byte_size(largest['bytes_per_image'])}",
            amount(recipe["gpu_hours"]),
        )
    return table
