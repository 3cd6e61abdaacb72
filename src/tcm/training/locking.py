"""One training at a time in a run's folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.weights import ELSEWHERE_FILE

LOCK_PATIENCE = 10.0
"""Seconds to wait for a run's lock: reading processes of a killed training live on for up to five."""


@contextmanager
def only_one(run: Path, processes: Processes) -> Iterator[None]:
    """Hold the run's lock, so that two trainings never write into one folder."""
    if (run / ELSEWHERE_FILE).exists():
        raise TcmError(f"{run} shares its stages with other runs of a study; train it with `tcm study run`")
    lock = FileLock(run / ".lock")
    with processes.agreeing():
        if processes.first:
            _acquire(lock, run)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: BaseFileLock, run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_PATIENCE)
    except Timeout as error:
        raise TcmError(f"{run} is being trained by another process; wait for it or choose another --run") from error
    except OSError as error:
        raise TcmError(f"{run} cannot be used as a run's folder ({error.strerror}); choose another --run") from error
