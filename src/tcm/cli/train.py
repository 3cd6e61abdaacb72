"""`tcm train`."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from tcm.cli.plan import is_data, planned_recipe
from tcm.foundation.errors import TcmError
from tcm.training.trackers import TrackerName


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="Your images, a shipped recipe (see `tcm recipes`), a TOML file, or a run's folder."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as `truncated.t_prime=1.5`.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="The run's folder; an existing run is resumed. [runs/RECIPE]")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data set or stream:…, in place of the recipe's `data.path`.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="For your images: how long to train, such as 20m or 2h. [1h]")
    ] = None,
    init: Annotated[str | None, typer.Option(help="The model that the first stage starts from.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu. [the accelerator, if there is one]")] = None,
    shard: Annotated[bool, typer.Option("--shard", help="Shard the weights across the processes (FSDP2).")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Train independent stages in parallel, in up to this many single-threaded processes."),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use deterministic kernels: the same bits each time, but slower.")
    ] = False,
    track: Annotated[list[TrackerName] | None, typer.Option(help="Also log to this service; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved run and its cost, and stop.")] = False,
) -> None:
    """Train on your images as `tcm plan` would, or the stages of a recipe; called again, resume."""
    from rich.console import Console

    from tcm.cli.cost_tables import cost_table, scaling_table
    from tcm.foundation.processes import join
    from tcm.recipes.folders import RECIPE_FILE
    from tcm.recipes.resolve import differences, resolve, to_toml
    from tcm.training.adapting import adapted
    from tcm.training.run import Run, RunOptions

    if Path(recipe, RECIPE_FILE).is_file():
        run, recipe = run or Path(recipe), str(Path(recipe, RECIPE_FILE))
    elif is_data(recipe):
        run = run or Path("runs", Path(recipe).stem)
        recipe = planned_recipe(recipe, run, budget or "1h", device)
    elif budget is not None:
        raise TcmError(f"--budget={budget} is for your own images; the recipe {recipe!r} says how many steps to train")
    changes = [*(overrides or []), *([f"data.path={data}"] if data else [])]
    if dry_run:
        resolved = resolve(recipe, changes)
        typer.echo(to_toml(resolved))
        Console().print(cost_table(resolved), scaling_table(resolved))
        return
    with join(device) as processes:
        console = Console(quiet=not processes.first)
        with processes.agreeing():
            named = resolve(recipe, changes)
            resolved = adapted(named)
        if adjustments := differences(named, resolved):
            console.print(f"adapted to {named.data.path}: {'; '.join(adjustments)}", highlight=False, soft_wrap=True)
        folder = run or Path("runs", resolved.name)
        training = Run(resolved, folder, processes, console, RunOptions(init, shard, tuple(track or ()), deterministic))
        done = training.train() if workers is None else training.train_side_by_side(workers)
        quoted = quote(str(folder))
        message = f"done: {folder}; see it with `tcm report {quoted}`" if done else f"resume with: tcm train {quoted}"
        console.print(message, highlight=False, markup=False, soft_wrap=True)
