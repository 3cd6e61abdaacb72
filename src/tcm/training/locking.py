"""One training at a time in a run's folder."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from tcm.foundation.errors import TcmError
from tcm.foundation.locks import LOOK_AGAIN
from tcm.foundation.processes import Processes
from tcm.weights import ELSEWHERE_FILE

LOCK_FILE = ".lock"
LOCK_PATIENCE = 6.0
"""Seconds to wait for a run's lock: reading processes of a killed training live on for up to five."""


@contextmanager
def only_one(run: Path, processes: Processes) -> Iterator[None]:
    """Hold the run's lock, so that two trainings never write into one folder."""
    if (run / ELSEWHERE_FILE).exists():
        raise TcmError(f"{run} shares its stages with other runs of a study; train it with `tcm study run`")
    lock = FileLock(run / LOCK_FILE)
    with processes.agreeing():
        if processes.first:
            _acquire(lock, run)
    try:
        yield
    finally:
        with suppress(OSError):
            if processes.first and [path.name for path in run.iterdir()] == [LOCK_FILE]:  # nothing came of it
                (run / LOCK_FILE).unlink()
                run.rmdir()
        lock.release()


def _acquire(lock: BaseFileLock, run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            lock.acquire(timeout=LOOK_AGAIN)
            return
        print(f"{run} is being trained by another process; waiting a moment for its end", file=sys.stderr, flush=True)
        lock.acquire(timeout=LOCK_PATIENCE)
    except Timeout as error:
        raise TcmError(f"{run} is being trained by another process; wait for it or choose another --run") from error
    except OSError as error:
        raise TcmError(f"{run} cannot be used as a run's folder ({error.strerror}); choose another --run") from error
