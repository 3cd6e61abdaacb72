"""A run while it trains: a page of what its files hold, which reloads itself."""

from dataclasses import dataclass
from html import escape
from math import isfinite
from pathlib import Path

from tcm.foundation.counting import duration
from tcm.foundation.errors import TcmError
from tcm.foundation.files import write_text
from tcm.foundation.locks import is_held
from tcm.recipes.decided import DECIDED_FILE
from tcm.recipes.estimates import estimate
from tcm.recipes.folders import RECIPE_FILE
from tcm.report import curves, figures, overview
from tcm.report.drawing import ObservedRun
from tcm.report.html import Html, figure, section, side_by_side
from tcm.report.page import whole_page
from tcm.report.records import RunRecord, StageRecord, read_run
from tcm.report.watching import watching
from tcm.training.locking import LOCK_FILE
from tcm.training.metrics import METRICS_FILE
from tcm.weights import stages_elsewhere


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
    trains = any(stage.status != "finished" for stage in run.stages)
    reload = f'<meta http-equiv="refresh" content="{every:g}">\n' if trains else ""
    return whole_page(f"{run.name} (live)", parts, reload)


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
    """The page of a run, written again only where its files have changed: figures take the time of many steps."""

    def __init__(self, run: Path, file: Path, every: float) -> None:
        read_run(run)
        self._run, self._file, self._every = run, file, every
        self._seen: dict[Path, int | None] | None = None

    def write(self) -> bool:
        """Write the page if it would differ from the last one; false when the run has finished."""
        try:
            seen: dict[Path, int | None] = {path: path.stat().st_mtime_ns for path in _watched(self._run)}
            seen[self._run / LOCK_FILE] = is_held(self._run / LOCK_FILE)
            if seen != self._seen:
                write_text(self._file, live_page(self._run, self._every))
            self._seen = seen
            return any(stage.status != "finished" for stage in read_run(self._run).stages)
        except FileNotFoundError:  # a file in the middle of a change: the next look will see it
            return True


def _watched(folder: Path) -> list[Path]:
    """The files whose change changes the page; the stages of a study's run are elsewhere."""
    stages = [*stages_elsewhere(folder).values()] or [path for path in folder.iterdir() if path.is_dir()]
    patterns = (METRICS_FILE, DECIDED_FILE, "samples/*.png", "state/step-*", "model")
    return [folder / RECIPE_FILE, *(path for stage in stages for pattern in patterns for path in stage.glob(pattern))]
