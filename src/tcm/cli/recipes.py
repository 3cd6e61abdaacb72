"""`tcm recipes`: the runs that come with the package, and what they need."""

from typing import Annotated

import typer

from tcm.cli.flags import Group

app = typer.Typer(cls=Group, help="List the recipes, or show one in full.")


@app.callback(invoke_without_command=True)
def recipes(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the recipes, with the memory and GPU-hours that they need."""
    if context.invoked_subcommand is None:
        import json
        from importlib import resources

        from rich.console import Console

        from tcm.cli.recipe_table import recipe_table

        # Counted ahead by tools/count_recipes.py: a list builds no network, and imports none.
        counted = json.loads((resources.files("tcm.recipes") / "counted.json").read_text("utf-8"))
        if as_json:
            typer.echo(json.dumps(counted["recipes"], indent=2))
            return
        console = Console(highlight=False)
        console.print(recipe_table(counted["recipes"]))
        console.print("Rows: how often a step evaluates a network for each image: with gradient + tangents + plain.")
        console.print("Memory: the run's state, and what each image of a micro-batch adds to it.")
        console.print(f"GPU-hours: predicted for {counted['assumption']}.")
        console.print("`tcm recipes show NAME` prints a recipe in full.")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name, or a .toml file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as truncated.t_prime=1.5.")] = None,
) -> None:
    """Print a recipe as TOML, with every default written out."""
    from tcm.recipes.resolve import resolve, to_toml

    typer.echo(to_toml(resolve(name, overrides or [])), nl=False)
