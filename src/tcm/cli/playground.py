"""`tcm playground`: a page that generates with a model, in any browser."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tcm.cli.flags import ModelName


def playground(
    model: ModelName,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("playground.html"),
    runtime: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the npm package onnxruntime-web. [fetched with npm the first time, then kept]"
        ),
    ] = None,
) -> None:
    """Write one HTML file that holds the model and generates images in the browser, without a server or network."""
    from rich.console import Console

    from tcm.cli.sample import model_of
    from tcm.foundation.files import byte_size, check_writable

    found = model_of(model)
    check_writable(out)
    size = write_page(found, runtime, out)
    Console().print(f"{out} ({byte_size(size)}); open it in a browser", highlight=False, markup=False, soft_wrap=True)


def write_page(model: str, runtime: Path | None, out: Path) -> int:
    """Write the page of a model; returns the page's size."""
    from tcm.cli.export import one_network
    from tcm.foundation.errors import TcmError
    from tcm.foundation.extras import how_to_install, is_installed
    from tcm.foundation.progress import busy
    from tcm.report.playground.page import check_playable, write_playground
    from tcm.report.playground.runtime import fetched_runtime, runtime_in
    from tcm.weights import load

    loaded = one_network(load(model))
    check_playable(loaded.card)
    if not is_installed("onnx"):  # before anything is fetched
        raise TcmError(f"a playground needs more packages; {how_to_install('onnx')}")
    library = fetched_runtime() if runtime is None else runtime_in(runtime)
    shown = Path(model).name if Path(model).is_absolute() else model  # a page to share does not tell where you keep it
    with busy(f"writing {out}"):
        return write_playground(loaded, name_of(model), shlex.quote(shown), library, out)


def name_of(model: str) -> str:
    """A title for the page: the run's name, for the model of one of its stages.

    >>> name_of("digits"), name_of("runs/demo/2-truncated/model"), name_of("someone/cats")
    ('digits', 'demo, truncated', 'cats')
    """
    path = Path(model)
    if path.name != "model" or len(path.parts) < 3:
        return path.name
    return f"{path.parts[-3]}, {path.parts[-2].partition('-')[2] or path.parts[-2]}"
