"""What recipes need, as tables: parameters, memory, hours."""

from collections.abc import Iterable
from math import inf

from rich import box
from rich.markup import escape
from rich.table import Table

from tcm.foundation.errors import MissingPackages
from tcm.recipes.estimates import ASSUMPTION, LINKS, Images, StageCost, estimate, scaling
from tcm.recipes.resolve import resolve, shipped
from tcm.recipes.schema import Recipe

HOURS = f"GPU-hours: predicted for {ASSUMPTION}."


def overview() -> Table:
    """All shipped recipes, the smallest first."""
    rows = [(recipe, _known_costs(recipe)) for recipe in map(resolve, shipped())]
    table = Table(title="Recipes (memory and GPU-hours are estimates)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify = "left"
    for column in ("recipe", "network", "stages: batch×steps", "memory", "GPU-h"):
        table.add_column(column, justify="right" if column == "GPU-h" else "left", no_wrap=True)
    for recipe, costs in sorted(rows, key=_hours_of):
        stages = "\n".join(f"{name} {stage.batch}×{thousands(stage.steps)}" for name, stage in recipe.stages.items())
        shape = "×".join(map(str, recipe.image_shape or ()))
        if not costs:
            table.add_row(escape(recipe.name), f"{escape(recipe.network.kind)}\n{shape}", stages, "unknown", "")
            table.caption = "Unknown: needs packages that are not installed, the extra t2i."
            continue
        largest = max(costs.values(), key=lambda cost: cost.memory.state)
        table.add_row(
            escape(recipe.name),
            f"{millions(largest.parameters)}\n{shape}",
            stages,
            f"{size(largest.memory.state)}\n+ {size(largest.activations_per_image)}/image",
            amount(gpu_hours(costs.values())),
        )
    return table


def listing() -> list[dict[str, object]]:
    """The same for programs: sizes in bytes, GPU-hours as predicted."""
    rows = [(recipe, _known_costs(recipe)) for recipe in map(resolve, shipped())]
    return [
        {
            "name": recipe.name,
            "image_shape": recipe.image_shape,
            "conditional": recipe.conditional,
            "gpu_hours": gpu_hours(costs.values()) if costs else None,
            "stages": {
                name: {
                    "batch": recipe.stages[name].batch,
                    "steps": recipe.stages[name].steps,
                    "parameters": cost.parameters,
                    "step_flops": cost.step_flops,
                    "state_bytes": cost.memory.state,
                    "bytes_per_image": cost.activations_per_image,
                    "gpu_hours": cost.gpu_hours,
                }
                for name, cost in costs.items()
            },
        }
        for recipe, costs in sorted(rows, key=_hours_of)
    ]


def _known_costs(recipe: Recipe) -> dict[str, StageCost]:
    """The cost of each stage; nothing if the network needs packages that are not installed."""
    try:
        return stage_costs(recipe)
    except MissingPackages:
        return {}


def _hours_of(row: tuple[Recipe, dict[str, StageCost]]) -> float:
    """For sorting: recipes whose costs are unknown come last."""
    _, costs = row
    return gpu_hours(costs.values()) if costs else inf


def stage_costs(recipe: Recipe, images: Images | None = None) -> dict[str, StageCost]:
    """The cost of each stage."""
    return {name: estimate(recipe, stage, images=images) for name, stage in recipe.stages.items()}


def gpu_hours(costs: Iterable[StageCost]) -> float:
    """The sum over stages."""
    return sum(cost.gpu_hours for cost in costs)


def cost_table(recipe: Recipe, images: Images | None = None) -> Table:
    """What each stage of a recipe costs on GPUs."""
    title = f"{escape(recipe.name)}: cost of each stage, estimates"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "params", "FLOPs/step", "memory", "per image", "whole batch", "GPU-h"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, cost in stage_costs(recipe, images).items():
        table.add_row(
            name,
            millions(cost.parameters),
            f"{cost.step_flops:.3g}",
            size(cost.memory.state),
            f"+ {size(cost.activations_per_image)}",
            size(cost.memory.total),
            amount(cost.gpu_hours),
        )
    table.caption = f"Memory: the state, what each image adds, and both for the whole batch on one device. {HOURS}"
    table.caption_justify = "left"
    return table


def scaling_table(recipe: Recipe, images: Images | None = None) -> Table:
    """The predicted speed of each stage on 1, 8 and 64 GPUs."""
    title = f"{escape(recipe.name)}: predicted for more GPUs, not measured"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "GPUs", "batch", "sent", "--shard", "steps/s", "efficiency", "hours"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, stage in recipe.stages.items():
        for gpus in (count for count in (1, 8, 64) if stage.batch % (count * stage.accumulation) == 0):
            found = scaling(recipe, stage, gpus, images)
            table.add_row(
                name if gpus == 1 else "",
                str(gpus),
                str(stage.batch // gpus),
                size(found.replicated_bytes),
                size(found.sharded_bytes),
                f"{1 / found.seconds:.3g}",
                f"{found.efficiency:.2f}",
                amount(stage.steps * found.seconds / 3600),
            )
    table.caption = (
        f"Batch and bytes sent are per GPU and step. For {ASSUMPTION}, {LINKS}; "
        "no communication overlaps with computation."
    )
    table.caption_justify = "left"
    return table


def millions(count: int) -> str:
    """A number of parameters.

    >>> millions(1_119_276_709), millions(247_489)
    ('1119.3 M', '0.25 M')
    """
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e6:.2f} M"


def thousands(count: int) -> str:
    """A number of steps.

    >>> thousands(250_000), thousands(1_200), thousands(900)
    ('250K', '1.2K', '900')
    """
    return f"{count / 1000:g}K" if count >= 1000 else str(count)


def amount(hours: float) -> str:
    """A predicted number of hours, to two digits.

    >>> amount(0.0001), amount(0.01234), amount(1234.5)
    ('<0.01', '0.012', '1,200')
    """
    if hours < 0.01:
        return "<0.01"
    return f"{float(f'{hours:.2g}'):,.0f}" if hours >= 10 else f"{hours:.2g}"


def size(count: int) -> str:
    """A number of bytes.

    >>> size(1_500_000), size(22_400_000_000)
    ('1.5 MB', '22.4 GB')
    """
    return (
        f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.2g} MB" if count < 1e7 else f"{count / 1e6:.0f} MB"
    )
