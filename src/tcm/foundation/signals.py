"""Signals that ask a run to stop: Ctrl-C, a scheduler's SIGTERM, SLURM's pre-emption SIGUSR1 (not on Windows)."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGUSR1")]


class StopRequest:
    """Whether someone has asked the run to stop, and by which signal.

    With torchrun one Ctrl-C comes twice, from the terminal and from torchrun: `patient` takes the second for the first.
    """

    def __init__(self, patient: bool) -> None:
        self.by: str | None = None
        self._patient = patient

    def __bool__(self) -> bool:
        return self.by is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember it; a second Ctrl-C stops at once."""
        if self.by is not None and number == signal.SIGINT and not self._patient:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name


@contextmanager
def stop_requests(patient: bool) -> Iterator[StopRequest]:
    """While the block runs, the stop signals are noted and do not end the process."""
    request = StopRequest(patient)
    before = {number: signal.signal(number, request.note) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
