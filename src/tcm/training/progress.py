"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, nothing from the other processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class StageProgress:
    """The progress of one stage."""

    def __init__(self, console: Console, stage: str, steps: int, live: Progress | None, task: TaskID | None) -> None:
        self._console, self._stage, self._steps, self._live, self._task = console, stage, steps, live, task

    def at(self, step: int) -> None:
        """`step` steps are done."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=step)

    def begin(self, step: int) -> None:
        """Go on from `step`: what was done before it says nothing about the speed."""
        if self._live is not None and self._task is not None:
            self._live.reset(self._task, completed=step)

    def report(self, step: int, values: dict[str, Any]) -> None:
        """The numbers of a window."""
        parts = [f"{name} {values[name]:.4g}" for name in SHOWN if name in values]
        parts.append(f"{values['images_per_second']:.0f} images/s")
        line = "  ".join(parts)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, numbers=line)
        else:
            self._print(f"{self._stage} {step}/{self._steps}  {line}")

    def say(self, message: str) -> None:
        """Something happened."""
        self._print(f"{self._stage}: {message}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


SHOWN = ("loss", "denoising", "consistency", "boundary", "gradient_norm")


@contextmanager
def stage_progress(console: Console, stage: str, steps: int) -> Iterator[StageProgress]:
    """Show the progress of a stage while the block runs."""
    if not console.is_terminal:
        yield StageProgress(console, stage, steps, None, None)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as live:
        task = live.add_task(stage, total=steps, numbers="")
        yield StageProgress(console, stage, steps, live, task)
