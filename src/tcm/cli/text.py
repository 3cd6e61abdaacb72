"""`tcm text`: fetch text encoders."""

from typing import Annotated

import typer

from tcm.cli.flags import Group

app = typer.Typer(cls=Group, no_args_is_help=True, help="Fetch text encoders.")


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="The encoder's name: minilm.")]) -> None:
    """Fetch a text encoder and verify it; a second call only verifies it."""
    from tcm.text.fetch import fetch_encoder

    typer.echo(f"{name}: {fetch_encoder(name)} (verified)")


@app.callback()
def group() -> None:
    """Keep `fetch` a command of its own: Typer would let a single one take the group's place."""
