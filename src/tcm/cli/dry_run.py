"""What `tcm train --dry-run` shows: the stages, and what they need on this machine."""

from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from tcm.cli.amounts import amount, millions
from tcm.foundation.counting import duration
from tcm.foundation.files import byte_size
from tcm.recipes.estimates import ASSUMPTION, estimate
from tcm.recipes.schema import Recipe
from tcm.training.checkpoint import newest_step
from tcm.training.metrics import METRICS_FILE, read_metrics
from tcm.training.run import RunPlan


def plan_table(recipe: Recipe, plan: RunPlan, processes: int = 1) -> Table:
    """The stages of a run: how far they are, the memory that they need, and the time that remains, if it is known."""
    table = Table(title=escape(recipe.name), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "begins", "steps", "batch", "params", "memory", "A100-h", "time left"):
        table.add_column(column, justify="left" if column in ("stage", "begins") else "right")
    card = next(iter(plan.cards.values()))
    for name, stage in recipe.stages.items():
        cost = estimate(recipe, stage, processes, (card.image_shape, card.condition))
        step = newest_step(plan.folders[name])
        seconds = _seconds_per_step(plan.folders[name], stage.batch)
        left = "done" if name in plan.done else "" if seconds is None else duration((stage.steps - step) * seconds)
        table.add_row(
            plan.folders[name].name,
            "" if name in plan.done else f"at step {step:,}",
            f"{'≤ ' if stage.until_flat and name not in plan.done else ''}{stage.steps:,}",
            f"{stage.batch:,}",
            millions(cost.parameters),
            byte_size(cost.memory.total),
            amount(cost.gpu_hours),
            left,
        )
    table.caption = (
        f"Memory: predicted, of each process. A100-h: GPU-hours predicted for {ASSUMPTION}. "
        "Time left: at the speed of this run so far, once it has one."
    )
    table.caption_justify = "left"
    return table


def _seconds_per_step(stage: Path, batch: int) -> float | None:
    """As the stage's newest metrics have it."""
    path = stage / METRICS_FILE
    speeds = [line["images_per_second"] for line in read_metrics(path) if "loss" in line] if path.is_file() else []
    return batch / speeds[-1] if speeds else None
