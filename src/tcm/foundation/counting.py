"""Progress of long passes over images: a bar on a terminal, a line every ten seconds in a log."""

import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from tcm.foundation.processes import Processes
from tcm.foundation.threads import paced, usable_counts

LOG_SECONDS = 10.0

Batches = Iterable[Tensor]
Counter = Callable[[Batches, int | None, str], Iterator[Tensor]]
"""Yields batches unchanged and shows how many images of a total (None if unknown) have passed, under a name."""


def uncounted(batches: Batches, total: int | None, text: str) -> Iterator[Tensor]:
    """Show nothing."""
    yield from batches


def counter(processes: Processes, console: Console | None = None, every: float = LOG_SECONDS) -> Counter:
    """Show the passes of the first process on stderr, in the way that fits where stderr goes.

    Each pass is made with the number of threads that is best for it.
    """
    console = console or Console(stderr=True)

    def count(batches: Batches, total: int | None, text: str) -> Iterator[Tensor]:
        batches = paced(batches, usable_counts(processes))
        if not processes.first:
            return uncounted(batches, total, text)
        return (
            _bar(batches, total, text, console) if console.is_terminal else _lines(batches, total, text, console, every)
        )

    return count


def _bar(batches: Batches, total: int | None, text: str, console: Console) -> Iterator[Tensor]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=total)
        for batch in batches:
            yield batch
            progress.advance(task, len(batch))


def _lines(batches: Batches, total: int | None, text: str, console: Console, every: float) -> Iterator[Tensor]:
    done, start = 0, time.monotonic()
    said = start
    for batch in batches:
        yield batch
        done += len(batch)
        now = time.monotonic()
        if now - said >= every:
            said = now
            console.print(f"{text}: {counted(done, total, now - start)}", highlight=False, markup=False, soft_wrap=True)


def plural(count: int, noun: str) -> str:
    """A number of things.

    >>> plural(1, "seed"), plural(1200, "image")
    ('1 seed', '1,200 images')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def counted(done: int, total: int | None, seconds: float) -> str:
    """How far a pass has come, and how long it will still take.

    >>> counted(1000, 50_000, 10.0), counted(640, None, 10.0)
    ('1,000 of 50,000 images, 100.0 images/s, 8 min 10 s left', '640 images, 64.0 images/s')
    """
    speed = done / max(seconds, 1e-9)
    if total is None:
        return f"{done:,} images, {speed:.1f} images/s"
    return f"{done:,} of {total:,} images, {speed:.1f} images/s, {duration(max(total - done, 0) / speed)} left"


def duration(seconds: float) -> str:
    """A length of time as text.

    >>> duration(42.4), duration(312), duration(9000), duration(200_000)
    ('42 s', '5 min 12 s', '2 h 30 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
