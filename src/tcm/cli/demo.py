"""`tcm demo`: the whole method on handwritten digits, measured and shown."""

import shlex
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

TIMES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 80.0)
"""Where denoising is measured before and after truncation."""


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as `truncated.t_prime=0.5`.")
    ] = None,
    run: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs", "demo"),
    samples: Annotated[int, typer.Option(min=200, help="How many images each distance is measured on.")] = 5000,
    workers: Annotated[int, typer.Option(min=1, help="How many processes train and measure in parallel.")] = 2,
) -> None:
    """Train all stages on handwritten digits, measure them and show the report; run it again to resume."""
    from rich.console import Console
    from rich.text import Text

    from tcm.data.pixels import to_uint8
    from tcm.evaluation.whole_run import MeasurementPlan, measure_stage, unmeasured_stages
    from tcm.foundation.files import write_text
    from tcm.foundation.processes import join
    from tcm.foundation.signals import Stopped
    from tcm.foundation.workers import Job
    from tcm.recipes.folders import stage_folders
    from tcm.recipes.resolve import resolve
    from tcm.report.terminal import preview
    from tcm.training.run import Run
    from tcm.weights import Model

    console = Console()
    recipe = resolve("demo", overrides or [])
    page = run / "playground.html"
    summary, model = run / "summary.txt", stage_folders(recipe, run)["truncated"] / "model"
    plan = MeasurementPlan("digits", samples, TIMES)
    measuring = [
        Job(f"measure {name}", partial(measure_stage, recipe, run, name, plan), after=frozenset({name}))
        for name in unmeasured_stages(recipe, run, plan)
    ]
    if measuring:
        for old in (summary, page):
            old.unlink(missing_ok=True)
    try:
        with join("cpu") as processes:
            Run(recipe, run, processes, console).train_side_by_side(workers, measuring)
    except Stopped:
        again = shlex.join(["tcm", "demo", *(overrides or []), "--run", str(run), "--samples", str(samples)])
        console.print(f"stopped; resume with: {again}", highlight=False, markup=False, soft_wrap=True)
        raise
    if not summary.exists():
        with console.status("drawing the report"):
            write_text(summary, show(run, model))
    if console.is_terminal:
        console.print("One step from noise, stage 2, seeds 0 to 15:")
        console.print(preview(to_uint8(Model.load(model).sample(16)), columns=8))
    console.print(Text.from_ansi(summary.read_text("utf-8")), soft_wrap=True)
    with console.status("writing the playground"):
        line = playground_line(model, page)
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def playground_line(model: Path, page: Path) -> str:
    """Write the page that generates with the model, if it is not there; returns where it is, or how to get it."""
    from tcm.cli.playground import write_page
    from tcm.foundation.errors import TcmError

    if not page.exists():
        try:
            write_page(str(model), None, page)
        except TcmError as error:
            return f"To generate in your browser: tcm playground {model} --out {page}\n  ({error})"
    return f"To generate in your browser, open {page}"


def show(run: Path, model: Path) -> str:
    """Write the report; returns the headline and what to do next, for the terminal."""
    from rich.console import Console

    from tcm.report.drawing import observe_run
    from tcm.report.headline import headline_rows
    from tcm.report.page import write_report
    from tcm.report.records import read_run
    from tcm.report.terminal import headline_table

    report = run / "report.html"
    observed = observe_run(read_run(run))
    write_report([observed], report)
    page = Console(record=True, file=StringIO(), force_terminal=True, color_system="truecolor", width=100)
    page.print(headline_table(headline_rows([observed])))
    page.print(
        f"\nThe report: {report}\n\n"
        f"Try next:\n"
        f"  tcm sample {model} -n 64 --out grid.png\n"
        f"  tcm train digits truncated.t_prime=0.5 --run runs/my-first\n"
        f"  tcm data info PATH-TO-YOUR-IMAGES",
        highlight=False,
        soft_wrap=True,
    )
    return page.export_text(styles=True)
