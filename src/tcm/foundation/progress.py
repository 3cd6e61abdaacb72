"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, nothing from the other processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StageProgress(Protocol):
    """The progress of one stage."""

    def begin(self, step: int) -> None:
        """Training starts at `step`: what was done before it says nothing about the speed."""
        ...

    def at(self, step: int) -> None:
        """`step` steps are done."""
        ...

    def report(self, step: int, means: dict[str, float], images_per_second: float) -> None:
        """The losses and gradient norms of a window, and its speed."""
        ...

    def say(self, message: str) -> None:
        """Show a message about the stage."""
        ...


class PrintedProgress:
    """Progress as plain lines, for logs."""

    def __init__(self, console: Console, stage: str, steps: int) -> None:
        self._console, self._stage, self._steps = console, stage, steps

    def begin(self, step: int) -> None:
        """Print nothing."""

    def at(self, step: int) -> None:
        """Print nothing: this is called at every step."""

    def report(self, step: int, means: dict[str, float], images_per_second: float) -> None:
        self._print(f"{self._stage} {step}/{self._steps}  {_numbers(means, images_per_second)}")

    def say(self, message: str) -> None:
        self._print(f"{self._stage}: {message}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveProgress(PrintedProgress):
    """A progress bar, with messages above it."""

    def __init__(self, live: Progress, stage: str, steps: int) -> None:
        super().__init__(live.console, stage, steps)
        self._live = live
        self._task: TaskID | None = None

    def begin(self, step: int) -> None:
        if self._task is None:
            self._task = self._live.add_task(self._stage, total=self._steps, numbers="")
        self._live.reset(self._task, completed=step)

    def at(self, step: int) -> None:
        if self._task is not None:
            self._live.update(self._task, completed=step)

    def report(self, step: int, means: dict[str, float], images_per_second: float) -> None:
        if self._task is not None:
            self._live.update(self._task, numbers=_numbers(means, images_per_second))


@dataclass(frozen=True)
class ProgressMessage:
    """A call of a stage's progress on its way to the process that shows it."""

    stage: str
    steps: int
    call: Callable[[StageProgress], None]


class SentProgress:
    """The progress of a stage that another process shows."""

    def __init__(self, send: Callable[[ProgressMessage], None], stage: str, steps: int = 0) -> None:
        self._send, self._stage, self._steps = send, stage, steps

    def begin(self, step: int) -> None:
        self._call(methodcaller("begin", step))

    def at(self, step: int) -> None:
        self._call(methodcaller("at", step))

    def report(self, step: int, means: dict[str, float], images_per_second: float) -> None:
        self._call(methodcaller("report", step, means, images_per_second))

    def say(self, message: str) -> None:
        self._call(methodcaller("say", message))

    def _call(self, call: Callable[[StageProgress], None]) -> None:
        self._send(ProgressMessage(self._stage, self._steps, call))


Show = Callable[[str, int], StageProgress]
"""The progress of a stage, given by its name and number of steps."""


@contextmanager
def progress_of_stages(console: Console) -> Iterator[Show]:
    """While the block runs, show the progress of any stage."""
    if not console.is_terminal:
        yield lambda stage, steps: PrintedProgress(console, stage, steps)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as live:
        yield lambda stage, steps: LiveProgress(live, stage, steps)


@contextmanager
def busy(text: str) -> Iterator[None]:
    """While the block runs, show on stderr what is done: with the time on a terminal, as one line elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{text} …", highlight=False, markup=False, soft_wrap=True)
        yield
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as live:
        live.add_task(escape(text))
        yield


@contextmanager
def heard_progress(console: Console) -> Iterator[Callable[[ProgressMessage], None]]:
    """While the block runs, show the progress that other processes send."""
    stages: dict[str, StageProgress] = {}
    with progress_of_stages(console) as show:

        def hear(message: ProgressMessage) -> None:
            if message.stage not in stages:
                stages[message.stage] = show(message.stage, message.steps)
            message.call(stages[message.stage])

        yield hear


def _numbers(means: dict[str, float], images_per_second: float) -> str:
    return "  ".join([*(f"{name} {value:.4g}" for name, value in means.items()), f"{images_per_second:.0f} images/s"])
