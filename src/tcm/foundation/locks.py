"""Locks between processes: waiting for one is said, and hears a stop."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from tcm.foundation.signals import Stopped, StopRequest

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


def is_held(file: Path) -> bool | None:
    """Whether a process holds this lock; None if that cannot be seen."""
    try:
        with FileLock(file, timeout=0) if file.exists() else nullcontext():
            return False
    except Timeout:
        return True
    except OSError:
        return None


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def locked(
    file: Path, what: str, say: Callable[[str], None] = _to_stderr, stop: StopRequest | None = None
) -> Iterator[None]:
    """Hold a lock; if another process has it, say once `what` that process does. Raises Stopped if asked to stop."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, stop = FileLock(file), StopRequest(patient=True) if stop is None else stop
    if stop or not acquire(lock, stop, lambda: say(f"waiting for another process, which {what}")):
        raise Stopped
    try:
        yield
    finally:
        lock.release()
