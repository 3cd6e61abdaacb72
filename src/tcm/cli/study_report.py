"""`tcm study report`: what a study has found."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def study_report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; the Markdown is written next to it. [DIR/report.html]")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write the report of a study, finished or in progress: report.html, and report.md with its tables."""
    from rich.console import Console

    from tcm.studies.page import write_study_report
    from tcm.studies.results import read_study
    from tcm.studies.words import verdict_parts, verdict_sentence

    target = out or folder / "report.html"
    results = read_study(folder)
    with Console(stderr=True).status("drawing"):
        write_study_report(results, target)
    console = Console()
    for line in (verdict_sentence(results), *verdict_parts(results)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {target}", highlight=False, soft_wrap=True)
    if open_it:
        webbrowser.open(target.resolve().as_uri())
