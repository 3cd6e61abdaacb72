"""How many threads a CPU computes with: measured, as the best number depends on the work and on other programs."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import Tensor

from tcm.foundation.processes import Processes

ENOUGH, KEEP = 0.85, 0.8
"""Shares of the best speed: the fewest threads that reach the first are chosen, and kept while they reach the other."""
SLOWER = 2.0
"""A number of threads that takes this many times as long as the best is not timed again."""
TRIAL_SECONDS, PATIENCE = 0.3, 60.0
"""Each number is timed for so long; once all together have taken PATIENCE, no further one is tried."""
WINDOW_SECONDS, SLOWED = 2.0, 1.5
"""Speed is watched over windows; one that takes SLOWED times as long as the first is a reason to measure again."""
PAUSE, SLOWED_PAUSE = 100, 10
"""Work goes on for at least so many times what measuring took, if nothing changes and if the speed has fallen."""


def usable_counts(processes: Processes) -> list[int]:
    """The numbers of threads to choose from: powers of two up to all cores, or the one that is fixed.

    OMP_NUM_THREADS fixes it; beside an accelerator or other processes of the same run, it stays as it is.
    """
    most = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or processes.device.type != "cpu" or processes.count > 1:
        return [most]
    return [*(2**i for i in range((most - 1).bit_length())), most]


class Threads:
    """The number of threads for a kind of work: chosen by timing pieces of it, and again as the machine's load changes.

    Call `begin` before each piece of work and `end` after it. While `due`, pieces are timed with different numbers.
    """

    def __init__(
        self, counts: Sequence[int], current: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counts, self._clock = sorted(counts, reverse=True), clock
        self.known = current if current in self.counts else None
        self._trying: int | None = None
        self._begin_trial()

    @property
    def count(self) -> int:
        """The number of threads for the next piece of work, unless it is one to be timed."""
        return self.known or self.counts[0]

    @property
    def due(self) -> bool:
        """Whether the best number has to be found, or found again."""
        return bool(self._untimed)

    def begin(self, trying: bool = True) -> None:
        """Set the number of threads of the next piece of work; without `trying` it is the one last chosen."""
        self._trying = self._untimed[0] if trying and self.due else None
        _use(self._trying or self.count)
        self._began = self._clock()

    def settle(self, work: Callable[[], object], size: int) -> None:
        """Find the best number, if that is due, by `work` whose results nobody needs."""
        while self.due:
            self.begin()
            work()
            self.end(size)

    def end(self, size: int) -> None:
        """Take note of the time that a piece of work of this size took."""
        now = self._clock()
        seconds = now - self._began
        if self._trying is not None:
            self._note(self._trying, seconds, size)
        elif not self.due:
            self._watch(seconds, size, now)

    def describe(self) -> str:
        """The choice and the speeds that led to it, if there was one: `1 thread (2: 580.1, 1: 2,370.4 images/s)`."""
        speeds = ", ".join(f"{count}: {1 / fmean(times):,.1f}" for count, times in self._timed().items())
        return f"{self.count} thread{'s' if self.count > 1 else ''}" + (f" ({speeds} images/s)" if speeds else "")

    def _begin_trial(self) -> None:
        counts = sorted(self.counts, key=lambda count: count != self.known)  # what takes long is timed but once
        self._seconds = {count: list[float]() for count in counts}
        self._spent = dict.fromkeys(self.counts, 0.0)
        self._untimed = counts if len(counts) > 1 else []
        self._window = (0.0, 0)
        self._usual: float | None = None
        self._chosen_at = self._clock()

    def _note(self, count: int, seconds: float, size: int) -> None:
        self._seconds[count].append(seconds / size)
        self._spent[count] += seconds
        timed = self._timed()
        best, cost = min(fmean(times) for times in timed.values()), sum(self._spent.values())
        open_counts = [
            count
            for count, times in self._seconds.items()
            if cost < PATIENCE
            and (len(times) < 2 or (self._spent[count] < TRIAL_SECONDS and fmean(timed[count]) < SLOWER * best))
        ]
        self._untimed = sorted(open_counts, key=lambda count: len(self._seconds[count]))
        if not self._untimed:
            self._choose(timed, best)

    def _timed(self) -> dict[int, list[float]]:
        """Seconds by number of threads; the first of several warmed up."""
        return {count: times[1:] or times for count, times in self._seconds.items() if times}

    def _choose(self, timed: dict[int, list[float]], best: float) -> None:
        shares = {count: best / fmean(times) for count, times in timed.items()}
        if self.known is None or shares.get(self.known, 0) < KEEP:
            self.known = min(count for count, share in shares.items() if share >= ENOUGH)
        self._chosen_at = self._clock()

    def _watch(self, seconds: float, size: int, now: float) -> None:
        """Measure again when the work has become slower, and after a long while."""
        if len(self.counts) == 1:
            return
        self._window = (self._window[0] + seconds, self._window[1] + size)
        if self._window[0] < WINDOW_SECONDS:
            return
        taken = self._window[0] / self._window[1]
        self._window = (0.0, 0)
        self._usual = self._usual or taken
        cost, since = sum(self._spent.values()), now - self._chosen_at
        if since > PAUSE * cost or (taken > SLOWED * self._usual and since > SLOWED_PAUSE * cost):
            self._begin_trial()


def paced(batches: Iterable[Tensor], counts: Sequence[int]) -> Iterator[Tensor]:
    """The batches, made and used with the number of threads that is best for them."""
    threads = Threads(counts)
    with threads_restored():
        threads.begin()
        for batch in batches:
            yield batch
            threads.end(len(batch))
            threads.begin()


@contextmanager
def threads_restored() -> Iterator[None]:
    """After the block torch computes with as many threads as before it."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        _use(before)


def _use(count: int) -> None:
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
