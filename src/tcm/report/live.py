"""A run while it trains: a page of what its files hold, served on this machine only, which reloads itself."""

from dataclasses import dataclass
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isfinite
from pathlib import Path
from threading import Lock

from tcm.foundation.counting import duration
from tcm.foundation.errors import TcmError
from tcm.foundation.locks import is_held
from tcm.recipes.decided import DECIDED_FILE
from tcm.recipes.estimates import estimate
from tcm.recipes.folders import RECIPE_FILE
from tcm.report import curves, figures, overview
from tcm.report.drawing import ObservedRun
from tcm.report.html import Html, figure, paragraph, section, side_by_side
from tcm.report.page import whole_page
from tcm.report.records import RunRecord, StageRecord, read_run
from tcm.report.watching import watching
from tcm.training.locking import LOCK_FILE
from tcm.training.metrics import METRICS_FILE
from tcm.weights import stages_elsewhere

HERE = "127.0.0.1"
MOMENT = 0.2
"""Seconds after which a server without requests looks whether it has been asked to stop."""


@dataclass(frozen=True)
class Remaining:
    """How long a run will still train: seconds in each stage that is not finished, at the speeds seen so far."""

    stages: dict[str, float]

    @property
    def total(self) -> float:
        """The sum over stages."""
        return sum(self.stages.values())


def remaining(run: RunRecord) -> Remaining | None:
    """The time that is left; None before there is any speed to judge by.

    A stage without numbers of its own takes its predicted cost at the newest stage's seconds per FLOP.
    """
    known = [stage for stage in run.stages if _seconds_per_step(stage)]
    if not known:
        return None
    try:
        flops = {stage.name: estimate(run.recipe, stage.spec).step_flops for stage in run.stages}
    except TcmError:  # shapes that only the data know: all steps are taken to cost the same per image
        flops = {stage.name: stage.spec.batch for stage in run.stages}
    newest = known[-1]
    per_flop = _seconds_per_step(newest) / flops[newest.name]
    return Remaining(
        {
            stage.name: max(stage.spec.steps - stage.step, 0)
            * (_seconds_per_step(stage) or per_flop * flops[stage.name])
            for stage in run.stages
            if stage.status != "finished"
        }
    )


def _seconds_per_step(stage: StageRecord) -> float:
    """At the newest speed; 0 if none is known."""
    speeds = [line["images_per_second"] for line in stage.numbers[-1:]]
    return stage.spec.batch / speeds[0] if speeds and isfinite(speeds[0]) and speeds[0] > 0 else 0.0


def live_page(folder: Path, every: float) -> str:
    """The page of a run as its files are now; nothing is drawn from models, so that training keeps the machine."""
    run = read_run(folder)
    observed = ObservedRun(run, [], None)
    begun = [stage for stage in run.stages if stage.numbers]
    colours = figures.series_of(run.stages)
    plots = []
    if begun:
        plots.append(
            figure(
                figures.losses_over_steps(begun, colours),
                "Loss over steps",
                "The loss of each stage.",
            )
        )
    grids = overview.newest_grids(run, ("unfinished", "failed", "finished"))
    parts = [
        overview.top([observed]),
        section("Now", _now(run), side_by_side(plots)),
        section("Samples", "The newest grids that training drew.", side_by_side(grids)) if grids else "",
        watching([observed]),
        curves.stability([observed]),
        curves.losses([observed]),
    ]
    return whole_page(f"{run.name} (live)", parts, f'<meta http-equiv="refresh" content="{every:g}">\n')


def _now(run: RunRecord) -> Html:
    """Which stage trains, how far it is, its newest loss, and how long everything will still take."""
    current = next((stage for stage in run.stages if stage.status != "finished"), None)
    if current is None:
        return Html(
            f"All stages are finished. <code>tcm report {escape(str(run.folder))}</code> writes the full report."
        )
    most = "at most " if current.spec.until_flat else ""
    text = f"<strong>{escape(current.name)}</strong>, step {current.step:,} of {most}{current.spec.steps:,}"
    if current.numbers:
        line = current.numbers[-1]
        text += f", loss {line['loss']:.4g}, {line['images_per_second']:,.0f} images/s"
    left = remaining(run)
    if left is None:
        return Html(f"{text}. The time that is left is known after the first numbers.")
    each = ", ".join(f"{escape(name)} {duration(seconds)}" for name, seconds in left.stages.items())
    most = "at most " if any(stage.spec.until_flat for stage in run.stages) else ""
    return Html(
        f"{text}. Left: {most}<strong>{duration(left.total)}</strong> ({each}), without sampling and checkpoints."
    )


class LivePage:
    """The page of a run, made again only where its files have changed: figures take the time of many steps."""

    def __init__(self, folder: Path, every: float) -> None:
        self._folder, self._every = folder, every
        self._seen: dict[Path, int | None] | None = None
        self._page = ""
        self._making = Lock()  # the style of figures belongs to the process

    def current(self) -> str:
        """The page as the files are now."""
        with self._making:
            seen: dict[Path, int | None] = {path: path.stat().st_mtime_ns for path in _watched(self._folder)}
            seen[self._folder / LOCK_FILE] = is_held(self._folder / LOCK_FILE)
            if seen != self._seen:
                self._page, self._seen = live_page(self._folder, self._every), seen
            return self._page


def _watched(folder: Path) -> list[Path]:
    """The files whose change changes the page; the stages of a study's run are elsewhere."""
    stages = [*stages_elsewhere(folder).values()] or [path for path in folder.iterdir() if path.is_dir()]
    patterns = (METRICS_FILE, DECIDED_FILE, "samples/*.png", "state/step-*", "model")
    return [folder / RECIPE_FILE, *(path for stage in stages for pattern in patterns for path in stage.glob(pattern))]


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page of one run."""

    def __init__(self, page: LivePage, *arguments: object) -> None:
        self._page = page
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path != "/":
            self.send_error(404)
            return
        try:
            page = self._page.current()
        except (TcmError, OSError) as error:  # a file in the middle of a change: the next reload will show it
            page = whole_page("live", [paragraph(str(error), "failure")], '<meta http-equiv="refresh" content="2">\n')
        content = page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the page is asked for every few seconds."""


def serve(folder: Path, port: int = 0, every: float = 5) -> ThreadingHTTPServer:
    """A server of a run's live page on 127.0.0.1, at `port` or at a free one.

    Its `handle_request` serves one request, or returns without any after a moment.
    """
    read_run(folder)
    try:
        server = ThreadingHTTPServer((HERE, port), partial(_Handler, LivePage(folder, every)))
    except OSError as error:
        raise TcmError(f"--port={port} cannot be used ({error.strerror}); choose another, or leave it out") from error
    server.timeout = MOMENT
    return server
