"""`tcm watch`: a run's report while it trains."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, in progress or finished.")],
    out: Annotated[Path | None, typer.Option(help="The page to write. [live.html in the run's folder]")] = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks at the run.")] = 5,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write a page that shows how a run is doing while it trains, and reloads itself; Ctrl-C does not stop the run."""
    import time
    import webbrowser

    from rich.console import Console

    from tcm.foundation.signals import stop_requests
    from tcm.report.live import LivePage

    file = (out or run / "live.html").absolute()
    page = LivePage(run, file, every)
    trains = page.write()
    ends = "until the run ends (Ctrl-C to stop sooner)" if trains else "the run has finished"
    Console().print(f"{file}: open it in a browser; {ends}", highlight=False, markup=False, soft_wrap=True)
    if open_it:
        webbrowser.open(file.as_uri())
    # A noted signal, not KeyboardInterrupt: Python loses an exception that a signal raises within a destructor.
    with stop_requests(patient=False, quiet=True) as stop:
        while trains and not stop:
            waited_until = time.monotonic() + every
            while time.monotonic() < waited_until and not stop:
                time.sleep(0.1)
            trains = page.write()
