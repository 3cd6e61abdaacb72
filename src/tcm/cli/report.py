"""`tcm report`: what a run, or several, look like."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="The folder of a run; give several to compare them side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write. [RUN/report.html; report.html for several runs]")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write a self-contained HTML report of a run: finished, in progress or failed."""
    from rich.console import Console

    from tcm.report.drawing import observe_run
    from tcm.report.page import write_report
    from tcm.report.records import read_runs

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    records = read_runs(runs)
    with Console(stderr=True).status("drawing samples"):
        write_report([observe_run(record) for record in records], target)
    Console().print(f"report: {target}", highlight=False, soft_wrap=True)
    if open_it:
        webbrowser.open(target.resolve().as_uri())
