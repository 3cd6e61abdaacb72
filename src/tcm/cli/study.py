"""`tcm study`: the paper's tables and figures, repeated with several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcm.cli.flags import Group
from tcm.cli.study_report import study_report
from tcm.foundation.errors import TcmError, TcmWarning, last_line
from tcm.foundation.signals import Stopped

if TYPE_CHECKING:
    from tcm.studies.running import Outcome, Part
    from tcm.studies.schema import Study

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Repeat the paper's tables and figures with several seeds, or run a study of your own.",
)

app.command("report")(study_report)

MOST_SEEDS = 10_000
StudyName = Annotated[str, typer.Argument(help="A study's name (see `tcm study list`), or a .toml file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@app.command("list")
def list_studies(as_json: AsJson = False) -> None:
    """List the studies that come with the package."""
    import json

    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tcm.studies.common_stages import shared_stages
    from tcm.studies.resolve import resolve_study, shipped_studies, variants_of

    studies = [resolve_study(name) for name in shipped_studies()]
    stages = [len(shared_stages(study, variants_of(study, study.seeds[0]))) for study in studies]
    if as_json:
        listed = [
            {
                "name": study.name,
                "title": study.title,
                "where": study.where,
                "variants": list(study.variants),
                "seeds": list(study.seeds),
                "stages": count * len(study.seeds),
            }
            for study, count in zip(studies, stages, strict=True)
        ]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("study", "title", "in the paper", "variants\n× seeds", "stages\nto train"):
        table.add_column(column, no_wrap=column == "study")
    for study, count in zip(studies, stages, strict=True):
        size = f"{len(study.variants)} × {len(study.seeds)}"
        table.add_row(study.name, study.title, study.where, size, f"{count * len(study.seeds)}")
    console = Console(highlight=False)
    console.print(table)
    console.print("`tcm study show NAME` prints a study in full; `tcm study run NAME --out DIR` runs it.")


@app.command()
def show(name: StudyName, as_json: AsJson = False) -> None:
    """Print a study as TOML, with every default written out, after checking its variants."""
    from tcm.studies.resolve import resolve_study, study_to_toml, variants_of

    study = resolve_study(name)
    variants_of(study, study.seeds[0])
    typer.echo(study.model_dump_json(indent=2) + "\n" if as_json else study_to_toml(study), nl=False)


@app.command()
def run(
    name: StudyName,
    out: Annotated[Path, typer.Option(help="The study's folder; an interrupted study is resumed.")],
    seeds: Annotated[
        str | None, typer.Option(help="How many seeds, such as 3, or which, such as 0,1,2. [the study's own]")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many processes train and measure in parallel: on the CPU with one thread each, else one per "
            "device. [1 on the CPU, else one per device]",
        ),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="Run only one share of the variants, such as 1/4, for several machines.")
    ] = None,
    stages: Annotated[
        Path | None,
        typer.Option(
            help="A folder for trained stages that several studies share, so that none is trained or measured twice."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu. [the accelerator, if there is one]")] = None,
) -> None:
    """Train and measure all variants with all seeds; run it again to resume."""
    import warnings

    from rich.console import Console

    from tcm.foundation.devices import available_devices
    from tcm.foundation.processes import join
    from tcm.studies.folders import share_stages
    from tcm.studies.measuring import measure_variant
    from tcm.studies.resolve import resolve_study
    from tcm.studies.running import run_study

    study, console = _with_seeds(resolve_study(name), seeds), Console()
    share = _part(part)
    if device is not None and ":" in device:
        raise TcmError(
            f"--device {device} names a single device, but workers take the devices of a kind one by one; "
            f"use --device {device.partition(':')[0]}"
        )
    with join(device) as processes, warnings.catch_warnings():
        if processes.count > 1:
            raise TcmError("tcm study runs without torchrun; use --workers on one machine and --part on several")
        warnings.simplefilter("once", TcmWarning)
        if stages is not None:
            share_stages(out, stages)
        kind = processes.device.type
        found = 1 if kind == "cpu" else len(available_devices()) - 1
        outcome = run_study(study, out, measure_variant, console, workers or found, share, kind)
    _say_outcome(outcome, out, part)
    if not outcome.finished:
        raise Stopped(outcome.stopped_by)
    if outcome.failures:
        raise typer.Exit(1)


def _say_outcome(outcome: Outcome, out: Path, part: str | None) -> None:
    from tcm.foundation.counting import plural

    for run_of_it, failure in outcome.failures.items():
        typer.echo(f"failed: {run_of_it} ({failure.stage}): {last_line(failure.error)}")
    if not outcome.finished:
        typer.echo("stopped; the same command resumes")
    elif outcome.failures:
        typer.echo(f"{plural(len(outcome.failures), 'variant')} failed; the same command tries again")
    else:
        done = "done" if part is None else f"part {part} is done"
        typer.echo(f"{done}: {out}; see it with `tcm study report {out}`")


def _with_seeds(study: Study, text: str | None) -> Study:
    """The study with so many seeds, its own first, or with these."""
    if text is None:
        return study
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    if not numbers or not all(number.isdecimal() for number in numbers):
        raise TcmError(f"--seeds {text} is neither a number nor a list of seeds; write 3, or 0,1,2")
    given = [int(number) for number in numbers]
    if "," in text:
        if len(set(given)) < len(given):
            raise TcmError(f"--seeds {text} gives a seed twice; give each seed once")
        return study.model_copy(update={"seeds": tuple(given)})
    if given[0] > MOST_SEEDS:
        raise TcmError(f"--seeds {text} is a number of seeds; to run seed {text} alone, add a comma: --seeds {text},")
    if given[0] < 1:
        raise TcmError(f"--seeds {text} must be at least 1; to run seed 0 alone, write 0 with a comma: --seeds 0,")
    more = (seed for seed in range(given[0] + len(study.seeds)) if seed not in study.seeds)
    seeds = list(study.seeds)[: given[0]]
    seeds += [next(more) for _ in range(given[0] - len(seeds))]
    return study.model_copy(update={"seeds": tuple(seeds)})


def _part(text: str | None) -> Part | None:
    from tcm.studies.running import Part

    if text is None:
        return None
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise TcmError(f"--part {text} is not a share; write 1/4 for the first of four, up to 4/4")
    return Part(int(index), int(count))
