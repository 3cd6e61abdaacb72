"""Waiting for a lock of another process without becoming deaf to a stop."""

from collections.abc import Callable

from filelock import BaseFileLock, Timeout

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
