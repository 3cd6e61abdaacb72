"""What a recipe needs, as tables: parameters, memory, hours."""

from rich import box
from rich.markup import escape
from rich.table import Table

from tcm.cli.amounts import amount, evaluations, millions
from tcm.foundation.files import byte_size
from tcm.recipes.estimates import ASSUMPTION, LINKS, Images, estimate, scaling
from tcm.recipes.schema import Recipe


def cost_table(recipe: Recipe, images: Images | None = None) -> Table:
    """What each stage of a recipe costs on GPUs."""
    title = f"{escape(recipe.name)}: cost of each stage, estimates"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "params", "rows", "FLOPs", "memory", "per image", "whole batch", "GPU-h"):
        table.add_column(column, justify="left" if column == "stage" else "right", no_wrap=column == "stage")
    for name, stage in recipe.stages.items():
        cost = estimate(recipe, stage, images=images)
        table.add_row(
            name,
            millions(cost.parameters),
            evaluations(cost.rows.gradient, cost.rows.tangent, cost.rows.plain),
            f"{cost.step_flops:.3g}",
            byte_size(cost.memory.state),
            f"+ {byte_size(cost.activations_per_image)}",
            byte_size(cost.memory.total),
            amount(cost.gpu_hours),
        )
    table.caption = (
        "FLOPs: of a step. Rows: evaluations per image with gradient, with tangent and plain (targets, teacher). "
        "Memory: the state, what each image adds, and both for the whole batch on one device. "
        f"GPU-hours: predicted for {ASSUMPTION}."
    )
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
                byte_size(found.replicated_bytes),
                byte_size(found.sharded_bytes),
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
