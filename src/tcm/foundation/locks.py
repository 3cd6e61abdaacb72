"""Locks between processes: waiting for one is said, and hears a stop."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from tcm.foundation.signals import StopRequest

LOOK_AGAIN = 0.5
"""Seconds between looks at the stop request."""


def acquire(lock: BaseFileLock, stop: StopRequest, waiting: Callable[[], None] = lambda: None) -> bool:
    """Take a lock, and say once that it is being waited for; false if asked to stop meanwhile."""
    said = False
    while True:
        try:
            lock.acquire(timeout=LOOK_AGAIN)
            return True
        except Timeout:
            if stop:
                return False
            if not said:
                waiting()
            said = True


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Hold a lock; `what` says on stderr what another process does if it has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, never = FileLock(file), StopRequest(patient=True)
    acquire(lock, never, lambda: print(f"waiting for another process, which {what}", file=sys.stderr, flush=True))
    try:
        yield
    finally:
        lock.release()
