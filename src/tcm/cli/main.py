"""The root of the command line: version, debug switch, errors as one line."""

import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from tcm.cli import data, recipes, study, text
from tcm.cli.demo import demo
from tcm.cli.doctor import doctor
from tcm.cli.evaluate import best_times, evaluation
from tcm.cli.export import export_weights
from tcm.cli.flags import Group
from tcm.cli.plan import plan
from tcm.cli.playground import playground
from tcm.cli.push import push_model
from tcm.cli.report import report
from tcm.cli.sample import sample
from tcm.cli.train import train
from tcm.cli.watch import watch
from tcm.cli.weights import import_weights
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.signals import Stopped

app = typer.Typer(
    name="tcm",
    cls=Group,
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Truncated Consistency Models: train, sample, measure."""


app.command()(demo)
app.command()(plan)
app.command()(train)
app.command()(sample)
app.command("eval")(evaluation)
app.command("times")(best_times)
app.command()(report)
app.command()(watch)
app.command()(playground)
app.add_typer(study.app, name="study")
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
app.add_typer(text.app, name="text")
app.command()(doctor)
app.command("import")(import_weights)
app.command("export")(export_weights)
app.command("push")(push_model)


def _one_line(usual: Callable[..., None]) -> Callable[..., None]:
    """Show our own warnings as one line, without the code that gave them."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, TcmWarning):
            typer.echo(f"note: {message}", err=True)
        else:
            usual(message, category, *where)

    return show


def main() -> None:
    """Entry point of the `tcm` command: what a user can fix is one line and exit code 2."""
    warnings.showwarning = _one_line(warnings.showwarning)
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait for each other give up their core sooner: with other programs about, it is needed elsewhere.
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # read when torch is loaded
    try:
        app()
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    except (TcmError, OSError) as error:
        said = str(error) if isinstance(error, TcmError) else _of_a_file(error)
        if "--debug" in sys.argv or said is None:
            raise
        from rich.console import Console
        from rich.markup import escape

        text = escape(" ".join([said, *getattr(error, "__notes__", ())]))
        Console(stderr=True).print(f"[bold red]error:[/] {text}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _of_a_file(error: OSError) -> str | None:
    """What a system says of a file or a disk, with what to do; None for its other errors."""
    from tcm.foundation.files import is_full

    if is_full(error):
        return f"{error.filename or 'the disk'} has no room left ({error.strerror}); free some space and try again"
    if error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}; correct the path or its permissions (--debug shows where this was)"
