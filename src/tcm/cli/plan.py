"""`tcm plan`: a recipe for your images, this machine and the time you have."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcm.cli.data import write_in_form
from tcm.foundation.errors import TcmError
from tcm.foundation.files import write_text

if TYPE_CHECKING:
    from rich.table import Table

    from tcm.foundation.processes import Processes
    from tcm.planning.plan import PlannedRecipe

LARGEST = 64
"""Images with a longer side are made smaller, so that they train within hours on a CPU."""

USUAL_BUDGET = "1h"
LONGEST_BUDGET = 8760 * 3600
"""Seconds: a year."""
Budget = Annotated[str, typer.Option(help="How long to train, such as 20m, 2h or 1h30m.")]


def plan(
    data: Annotated[str, typer.Argument(help="A folder or zip of images, or any other data set.")],
    budget: Budget = USUAL_BUDGET,
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("recipe.toml"),
    device: Annotated[str | None, typer.Option(help="Such as cpu. [the accelerator, if there is one]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Look at the data and this machine, and write a recipe to train with."""
    from rich.console import Console

    from tcm.foundation.processes import join

    seconds = parse_budget(budget)
    if out.exists():
        raise TcmError(f"--out={out} exists; remove it or choose another name")
    with join(device) as processes:
        found = planned(data, seconds, processes, out.with_name(f"{out.stem}-data.zip"))
    write_text(out, found.toml())
    if as_json:
        typer.echo(json.dumps(as_dict(found, out)))
        return
    console = Console()
    console.print(table(found))
    console.print(f"{out}: edit it as you like, then: tcm train {out}", highlight=False, soft_wrap=True)


def planned(data: str, seconds: float, processes: Processes, prepared: Path) -> PlannedRecipe:
    """The plan for a data set, showing meanwhile what is being done; images of several sizes are first `prepared`."""
    from rich.console import Console

    from tcm.data import open_dataset
    from tcm.planning.plan import make_plan

    path = prepared_data(data, prepared)
    with Console(stderr=True).status("planning") as status:
        return make_plan(open_dataset(path), path, seconds, processes, status.update)


def prepared_data(data: str, target: Path) -> str:
    """The path of data whose images are all of one small size: the data itself, or a zip made from it."""
    from tcm.data.opening import open_pictures
    from tcm.data.prepare import one_small_form, survey

    pictures = open_pictures(data)
    found = survey(pictures)
    if found.size is not None and max(found.size) <= LARGEST and found.same_channels:
        return source_of(data)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_in_form(pictures, one_small_form(found), target, skip_broken=True, workers=os.cpu_count() or 1)
    return str(target.absolute())


def is_data(name: str) -> bool:
    """Whether a name that `tcm train` is given is that of images, not of a recipe."""
    from tcm.data.huggingface import HUB
    from tcm.data.opening import FETCHABLE
    from tcm.recipes.resolve import shipped

    if name in shipped() or name.endswith(".toml"):
        return False
    return Path(name).exists() or name in FETCHABLE or name.startswith(HUB)


def source_of(data: str) -> str:
    """A data set's name, or its absolute path if it is a file or folder."""
    return str(Path(data).absolute()) if Path(data).exists() else data


def table(found: PlannedRecipe) -> Table:
    """What was chosen and why, and how long each stage will take."""
    from rich.table import Table

    from tcm.foundation.counting import duration

    rows = Table(title="The plan", title_justify="left", show_header=False)
    rows.add_column(style="bold", overflow="fold", max_width=44)
    rows.add_column(overflow="fold")
    for choice in found.choices:
        rows.add_row(choice.what, choice.why)
    times = ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.seconds.items())
    rows.add_row(f"about {duration(sum(found.seconds.values()))} on this machine", times)
    return rows


def as_dict(found: PlannedRecipe, out: Path) -> dict[str, object]:
    """The plan for other programs."""
    choices = [{"what": choice.what, "why": choice.why, "keys": choice.keys} for choice in found.choices]
    return {"recipe": str(out), "seconds": found.seconds, "choices": choices}


def parse_budget(text: str) -> float:
    """Seconds.

    >>> parse_budget("20m"), parse_budget("1h30m")
    (1200.0, 5400.0)
    """
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip())
    parts = [float(part or 0) for part in match.groups()] if match else []
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not seconds:
        raise TcmError(f"--budget={text} is not a time; write it like 20m, 2h or 1h30m")
    if seconds > LONGEST_BUDGET:
        raise TcmError(f"--budget={text} is longer than a year; give at most {LONGEST_BUDGET // 3600}h")
    return seconds
