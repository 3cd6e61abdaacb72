"""Signals that ask a run to stop: Ctrl-C, a scheduler's SIGTERM, SLURM's pre-emption SIGUSR1 (not on Windows)."""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

STOP_SIGNALS = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGUSR1")]

Item = TypeVar("Item")

ANSWER = "finishing this step, then saving"
STDERR = 2


class StopRequest:
    """Whether someone has asked the run to stop, and by which signal.

    With torchrun one Ctrl-C comes twice, from the terminal and from torchrun: `patient` takes the second for the first.
    The first signal is answered at once on the standard error stream, unless this is `quiet`.
    """

    def __init__(self, patient: bool, quiet: bool = True) -> None:
        self.by: str | None = None
        self._patient, self._quiet = patient, quiet

    def __bool__(self) -> bool:
        return self.by is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember it; a second Ctrl-C stops at once."""
        if self.by is not None and number == signal.SIGINT and not self._patient:
            raise KeyboardInterrupt
        if self.by is None and not self._quiet:
            _say(ANSWER if self._patient else f"{ANSWER} (press again to stop without saving)")
        self.by = signal.Signals(number).name


class Stopped(Exception):
    """What was asked to stop, `by` this signal, has stopped before its end."""

    def __init__(self, by: str | None = None) -> None:
        super().__init__(by)
        self.by = by

    @property
    def exit_code(self) -> int:
        """As shells count: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1.

        But 0 under torchrun, which would take any other for a failure, and start the processes again.
        """
        number = signal.Signals.__members__.get(self.by or "", signal.SIGTERM)
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + number


def until_stopped(stop: StopRequest, items: Iterable[Item]) -> Iterator[Item]:
    """The items; raises Stopped once a stop has been asked for."""
    for item in items:
        if stop:
            raise Stopped
        yield item


def _say(text: str) -> None:
    """Write a line without Python's buffers: the signal may have interrupted code that is writing to them."""
    with suppress(OSError):  # nobody may be listening
        # On a terminal the cursor is behind a progress bar.
        os.write(STDERR, f"{chr(10) if os.isatty(STDERR) else ''}{text}\n".encode())


@contextmanager
def stop_requests(patient: bool, quiet: bool = False) -> Iterator[StopRequest]:
    """While the block runs, the stop signals are noted and do not end the process."""
    request = StopRequest(patient, quiet)
    before = {number: signal.signal(number, request.note) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
