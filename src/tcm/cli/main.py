"""The root of the command line: version, debug switch, errors as one line."""

from importlib.metadata import version
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from typer.core import TyperGroup

from tcm.cli.data import app as data
from tcm.cli.doctor import doctor
from tcm.errors import TcmError


class OneLineErrors(TyperGroup):
    """Prints what a user can mend as one line with exit code 2; `--debug` lets the traceback through."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except TcmError as error:
            if ctx.params["debug"]:
                raise
            Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    name="tcm",
    cls=OneLineErrors,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Turn a diffusion model into a one-step generator.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tcm {version('truncated-consistency')}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Truncated Consistency Models: train, sample, measure."""


app.command()(doctor)
app.add_typer(data, name="data")


def main() -> None:
    """Entry point of the `tcm` command."""
    app()
