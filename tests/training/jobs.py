"""Jobs for workers: in a file of their own, so that the processes that carry them out import little."""

import os
import signal
import time
import warnings
from pathlib import Path
from threading import Timer

from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.signals import StopRequest
from tcm.foundation.workers import Send


def note(folder: Path, name: str, send: Send, stop: StopRequest) -> bool:
    """Send a name and a process; leave a file that says who was there before."""
    send((name, os.getpid()))
    (folder / name).write_text(" ".join(sorted(path.name for path in folder.iterdir())))
    return True


def work_until_stopped(folder: Path, send: Send, stop: StopRequest) -> bool:
    send(("working", os.getpid()))
    (folder / "working").touch()
    while not stop:
        time.sleep(0.01)
    (folder / "stopped").write_text(str(stop.by))
    return False


def fail(folder: Path, send: Send, stop: StopRequest) -> bool:
    while not (folder / "working").exists():
        time.sleep(0.01)
    raise TcmError("disk=full; free some space")


def crash(send: Send, stop: StopRequest) -> bool:
    return 1 // 0 == 0


def die(send: Send, stop: StopRequest) -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def leave_a_file(folder: Path, worker: int) -> None:
    """What a worker begins with."""
    (folder / f"begun-{worker}").touch()


def die_when_idle(send: Send, stop: StopRequest) -> bool:
    """Leave a process that soon is killed, as by a system that is short of memory."""
    Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return True


def take_a_second(send: Send, stop: StopRequest) -> bool:
    time.sleep(1.0)
    return True


def warn(send: Send, stop: StopRequest) -> bool:
    warnings.warn("few images", TcmWarning, stacklevel=1)
    return True
