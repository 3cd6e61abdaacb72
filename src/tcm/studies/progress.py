"""What a person sees while a study runs: a live table on a terminal, one line per event in a log."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tcm.foundation.counting import duration
from tcm.foundation.errors import last_line
from tcm.foundation.progress import ProgressMessage

State = Literal["done", "failed", "running", "waiting"]


@dataclass(frozen=True)
class Task:
    """A job as its progress is counted: jobs of one kind take about equally long."""

    name: str
    kind: str
    variants: frozenset[str]
    """The variants, each with its seed, that need it."""


@dataclass(frozen=True)
class FromJob:
    """A message of a job: that it begins or has ended, or its progress."""

    job: str
    message: Literal["begins", "ended"] | ProgressMessage


@dataclass
class _Running:
    """A job that runs: since when, and which share of its steps was done before and is done now."""

    since: float
    before: float = 0.0
    done: float = 0.0


@dataclass
class Ledger:
    """Which jobs are done, run or wait, and how long the rest will take."""

    tasks: Sequence[Task]
    variants: Sequence[str]
    workers: int
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """How long whole jobs of a kind took."""
    running: dict[str, _Running] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._task = {task.name: task for task in self.tasks}

    def begin(self, job: str) -> None:
        self.running[job] = _Running(self.clock())

    def at(self, job: str, share: float, first: bool = False) -> None:
        """A share of a job's steps is done; the `first` of them were done before this job began."""
        if job in self.running:
            self.running[job].done = share
            if first:
                self.running[job].before = share

    def end(self, job: str) -> float:
        """A job is done; returns the seconds that it took."""
        run = self.running.pop(job)
        took = self.clock() - run.since
        if run.before < 1:
            self.seconds.setdefault(self._task[job].kind, []).append(took / (1 - run.before))
        self.done.add(job)
        return took

    def fail(self, job: str) -> None:
        self.running.pop(job, None)
        self.failed.add(job)

    def states(self) -> Counter[State]:
        """How many variants are done, failed, running and waiting."""
        return Counter(self._state(variant) for variant in self.variants)

    def _state(self, variant: str) -> State:
        jobs = {task.name for task in self.tasks if variant in task.variants}
        if jobs <= self.done:
            return "done"
        if jobs & self.failed:
            return "failed"
        return "running" if jobs & self.running.keys() else "waiting"

    def time_left(self) -> tuple[float, bool]:
        """The seconds that the rest will take, and whether that is all: false if some kind of job is new."""
        total, whole = 0.0, True
        for task in self.tasks:
            if task.name in self.done or all(self._state(variant) == "failed" for variant in task.variants):
                continue
            seconds = self._typical(task.kind)
            whole = whole and seconds is not None
            left = 1 - self.running[task.name].done if task.name in self.running else 1.0
            total += (seconds or 0.0) * left
        return total / self.workers, whole

    def _typical(self, kind: str) -> float | None:
        if kind in self.seconds:
            return mean(self.seconds[kind])
        runs = [run for job, run in self.running.items() if self._task[job].kind == kind and run.done > run.before]
        return mean([(self.clock() - run.since) / (run.done - run.before) for run in runs]) if runs else None

    def summary(self) -> str:
        """One line: the variants by their state, and the time left.

        >>> Ledger([Task("a", "diffusion", frozenset({"seed 0: base"}))], ["seed 0: base"], workers=1).summary()
        'variants: 0 done, 0 running, 1 waiting; time left not known yet'
        """
        states = self.states()
        counts = [f"{states[state]} {state}" for state in ("done", "failed", "running", "waiting")]
        counts = [count for count in counts if count != "0 failed"]
        seconds, whole = self.time_left()
        left = f"{'about' if whole else 'at least'} {duration(seconds)} left" if seconds else "time left not known yet"
        return f"variants: {', '.join(counts)}" + (f"; {left}" if states["running"] + states["waiting"] else "")


class _Report:
    """A job's own progress, which goes into the ledger and the job's bar."""

    def __init__(self, view: "StudyProgress", job: str, steps: int) -> None:
        self._view, self._job, self._steps = view, job, max(steps, 1)

    def begin(self, step: int) -> None:
        self._view.ledger.at(self._job, step / self._steps, first=True)
        self._view.draw(self._job, step, self._steps)

    def at(self, step: int) -> None:
        self._view.ledger.at(self._job, step / self._steps)
        self._view.draw(self._job, step, self._steps)

    def report(self, step: int, means: dict[str, float], images_per_second: float) -> None:
        """Show nothing: the losses of many jobs side by side tell little."""

    def say(self, message: str) -> None:
        self._view.say(f"{self._job}: {message}")


class StudyProgress:
    """Hears from the jobs of a study and shows how far it is."""

    def __init__(self, console: Console, ledger: Ledger) -> None:
        self.ledger, self._console = ledger, console
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        self._bars = Progress(*columns, console=console)
        self._bar: dict[str, TaskID] = {}

    def hear(self, heard: FromJob) -> None:
        """Take in a message of a job."""
        job, message = heard.job, heard.message
        if isinstance(message, ProgressMessage):
            message.call(_Report(self, job, message.steps))
        elif message == "begins":
            self.ledger.begin(job)
            self._bar[job] = self._bars.add_task(job, total=None)
            if not self._console.is_terminal:
                self.say(f"{job}: begins")
        else:
            took = self.ledger.end(job)
            self._remove(job)
            self.say(f"{job}: done in {duration(took)}; {self.ledger.summary()}")

    def fail(self, job: str, error: str) -> None:
        """A job has failed; the others continue."""
        self.ledger.fail(job)
        self._remove(job)
        self.say(f"{job}: failed: {last_line(error)}; {self.ledger.summary()}")

    def draw(self, job: str, step: int, steps: int) -> None:
        """Move a job's bar."""
        if job in self._bar:
            self._bars.update(self._bar[job], completed=step, total=steps)

    def say(self, text: str) -> None:
        """Print a line, above the live table where there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def table(self) -> Group:
        """The live table: a summary, and a bar for each job that runs."""
        return Group(Text(self.ledger.summary()), self._bars)

    def _remove(self, job: str) -> None:
        if job in self._bar:
            self._bars.remove_task(self._bar.pop(job))


@contextmanager
def shown(console: Console, ledger: Ledger) -> Iterator[StudyProgress]:
    """While the block runs, show the progress of a study."""
    view = StudyProgress(console, ledger)
    if not console.is_terminal:
        yield view
        return
    with Live(console=console, get_renderable=view.table, refresh_per_second=4):
        yield view
