"""`tcm watch`: a run's report while it trains."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, in progress or finished.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 takes a free one.")] = 0,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two refreshes of the page.")] = 5,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show in your browser how a run is doing while it trains; Ctrl-C stops the page, not the training."""
    import webbrowser

    from rich.console import Console

    from tcm.foundation.signals import stop_requests
    from tcm.report.live import HERE, serve

    # A noted signal, not KeyboardInterrupt: Python loses an exception that a signal raises within a destructor.
    with serve(run, port, every) as server, stop_requests(patient=False, quiet=True) as stop:
        address = f"http://{HERE}:{server.server_port}/"
        Console().print(f"watching {run} at {address} (Ctrl-C ends it)", highlight=False, soft_wrap=True)
        if open_it:
            webbrowser.open(address)
        while not stop:
            server.handle_request()
