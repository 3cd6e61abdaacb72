"""`tcm demo`: the whole method on handwritten digits, measured and shown."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tcm.data.pixels import to_uint8
from tcm.evaluation.runs import Plan, measure_run
from tcm.recipes.resolve import resolve
from tcm.report.drawing import observe_run
from tcm.report.headline import headline_rows
from tcm.report.page import write_report
from tcm.report.runs import read_run
from tcm.report.terminal import headline_table, preview
from tcm.training.processes import join
from tcm.training.run import Run, stage_folders
from tcm.weights import Model

PLAN = Plan(detector="digits", count=5000, times=(0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 80.0))


def demo(
    run: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs", "demo"),
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
) -> None:
    """Train all stages on handwritten digits, measure them and show the report; interrupted, go on where it was."""
    console = Console()
    recipe = resolve("demo", [f"seed={seed}"])
    with join("cpu") as processes:
        finished = Run(recipe, run, processes, console).train()
    if not finished:
        console.print(f"stopped; resume with: tcm demo --run {run}", highlight=False)
        return
    with console.status("measuring") as status:
        for what in measure_run(run, PLAN):
            status.update(f"measuring {what}")
    report = run / "report.html"
    with console.status("drawing the report"):
        observed = observe_run(read_run(run))
        write_report([observed], report)
    folder = stage_folders(recipe, run)["truncated"] / "model"
    console.print(headline_table(headline_rows([observed])))
    console.print("\nOne step from noise, stage 2, seeds 0 to 15:")
    console.print(preview(to_uint8(Model.load(folder).sample(16)), columns=8))
    console.print(
        f"\nThe report: {report}\n\n"
        f"Try next:\n"
        f"  tcm sample {folder} -n 64 --out grid.png\n"
        f"  tcm train digits truncated.t_prime=0.5 --run runs/my-first\n"
        f"  tcm data info PATH-TO-YOUR-IMAGES",
        highlight=False,
        soft_wrap=True,
    )
