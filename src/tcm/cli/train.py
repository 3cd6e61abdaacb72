"""`tcm train`."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from tcm.cli.plan import is_data
from tcm.cli.planned_run import planned_recipe, warn_of_changed_images
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.files import near_names
from tcm.training.trackers import TrackerName

if TYPE_CHECKING:
    from tcm.foundation.processes import Processes
    from tcm.training.run import Run


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="Your images, a shipped recipe (see `tcm recipes`), a TOML file, or a run's folder."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to the recipe, such as `truncated.t_prime=1.5`; `*.steps=500` changes all stages."
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="The run's folder; an existing run is resumed. [runs/RECIPE]")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data set or stream:…, instead of the recipe's `data.path`.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="For your images: how long to train, such as 20m or 2h. [1h]")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="The model that the first stage starts from: the folder or hub id of a model or of "
            "a Stable Diffusion pipeline."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu. [the accelerator, if there is one]")] = None,
    shard: Annotated[bool, typer.Option("--shard", help="Shard the weights across the processes (FSDP2).")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Train independent stages in parallel, in up to this many single-threaded processes."),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Use deterministic kernels: slower, but with the same bits each time."),
    ] = False,
    track: Annotated[list[TrackerName] | None, typer.Option(help="Also log to this service; may be repeated.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the stages, their memory and time, and stop.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With --dry-run: also print the whole recipe as TOML.")] = False,
) -> None:
    """Train on your own images, planned as by `tcm plan`, or train a recipe; the same command resumes."""
    from rich.console import Console

    from tcm.foundation.processes import join
    from tcm.foundation.signals import Stopped
    from tcm.recipes.overrides import key_of
    from tcm.recipes.resolve import differences, resolve
    from tcm.training.adapting import adapted, fitted_to
    from tcm.training.run import Run, RunOptions

    if full and not dry_run:
        raise TcmError("--full applies only to --dry-run; add --dry-run")
    changes = [*(overrides or []), *([f"data.path={data}"] if data else [])]
    uses_init = any(change.endswith("=init") for change in changes)
    with join(device) as processes:
        console = Console(quiet=not processes.first)
        with processes.agreeing():
            source = _source(recipe, run, budget, None if uses_init else init, processes, dry_run)
        if source is None:
            return
        path, run, own = source
        with processes.agreeing(), warnings.catch_warnings():
            if not processes.first:
                warnings.simplefilter("ignore", TcmWarning)  # the first process says it
            # What lies in the run's folder may be a stranger's; what is typed is not.
            typed = re.findall(r"[\w.]+(?=:\w)", " ".join(changes))
            named = resolve(path, changes, trust=path == recipe or typed)
            given = set(map(key_of, changes))
            # A run's own recipe has been adapted.
            fitted = named if own else fitted_to(named, init, given)
            resolved = named if own else adapted(fitted, given)
        for what, before, after in ((init, named, fitted), (named.data.path, fitted, resolved)):
            if adjustments := differences(before, after):
                console.print(f"adapted to {what}: {'; '.join(adjustments)}", highlight=False, soft_wrap=True)
        folder = run or Path("runs", resolved.name)
        options = RunOptions(init, shard, tuple(track or ()), deterministic)
        training = Run(resolved, folder, processes, console, options)
        if dry_run:
            _print_plan(training, workers, full)
            return
        say, quoted = partial(console.print, highlight=False, markup=False, soft_wrap=True), quote(str(folder))
        try:
            if workers is None:
                training.train()
            else:
                training.train_side_by_side(workers)
        except Stopped:
            say(f"resume with: tcm train {quoted}")
            raise
        say(f"done: {folder}; see it with `tcm report {quoted}`")


def _source(
    given: str, run: Path | None, budget: str | None, init: str | None, processes: Processes, dry_run: bool
) -> tuple[str, Path | None, bool] | None:
    """The recipe that is meant, the run's folder if it is known, and whether the recipe is a run's own.

    None for a dry run of images, which only shows the plan.
    """
    from tcm.data.opening import FETCHABLE
    from tcm.recipes.folders import RECIPE_FILE
    from tcm.recipes.resolve import shipped

    own = Path(given, RECIPE_FILE)
    if own.is_file() or not is_data(given):
        if not own.is_file() and given not in shipped() and not (given.endswith(".toml") and Path(given).exists()):
            near = near_names(given, [*shipped(), *FETCHABLE])
            advice = f"did you mean {near[0]}?" if near else "give your images, a recipe (see `tcm recipes`) or a run"
            raise TcmError(f"{given} does not exist; {advice}")
        if budget is not None:
            raise TcmError(f"--budget={budget} is for your own images; {given!r} says how many steps to train")
        if own.is_file() and processes.first:
            warn_of_changed_images(Path(given))
        return (str(own), run or Path(given), True) if own.is_file() else (given, run, False)
    if init is not None:
        raise TcmError(
            f"--init={init} has no use in a plan, which trains a diffusion model of its own; leave it out, or train a "
            f"recipe that starts from it (see `tcm recipes`) with --data {given}"
        )
    run = run or Path("runs", Path(given).stem)
    with TemporaryDirectory() if dry_run else nullcontext(run) as kept:
        planned = planned_recipe(given, Path(kept), budget, processes)
    return None if dry_run else (planned, run, False)


def _print_plan(training: Run, workers: int | None, full: bool) -> None:
    from tcm.cli.dry_run import plan_table
    from tcm.recipes.decided import settled
    from tcm.recipes.resolve import to_toml

    plan, console = training.check(workers), training.console
    recipe = settled(training.recipe, training.folder)
    if full:
        console.print(to_toml(training.recipe), highlight=False, markup=False, soft_wrap=True)
    for change in plan.resumption.said:
        console.print(f"changes: {change}", highlight=False, markup=False, soft_wrap=True)
    console.print(plan_table(recipe, plan, training.processes.count))
    for name, stage in recipe.stages.items():
        if keys := stage.undecided():
            low, _ = stage.span(recipe)
            text = f"{name}: the run decides {' and '.join(sorted(keys))}; until then it trains from t = {low:g} on"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
