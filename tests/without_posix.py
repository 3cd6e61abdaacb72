"""`tcm` on a Python that lacks what Windows lacks: run as `python without_posix.py ARGUMENTS`."""

import enum
import errno
import fcntl
import importlib
import os
import pkgutil
import shutil
import signal
import stat
import sys
from typing import Any

import torch
import torch.distributed.checkpoint  # torch asks sys.platform, which says Linux: it must come first

ABSENT = ("fcntl", "grp", "pwd", "resource", "termios")
_open, _fsync = os.open, os.fsync


def open_files_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
    """Refuse folders, as Windows does."""
    descriptor = _open(path, flags, *rest, **more)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return descriptor


def sync_writable(descriptor: int) -> None:
    """Refuse what is open for reading only, as Windows does."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    _fsync(descriptor)


def remove_posix() -> None:
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment] # importing it raises ImportError
    del os.sysconf, os.getloadavg, os.sched_getaffinity, os.getuid, os.fork
    del signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL, signal.SIGHUP
    known = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
    signal.Signals = enum.IntEnum("Signals", {s.name: s.value for s in signal.Signals if s.name in known})
    os.open, os.fsync = open_files_only, sync_writable
    shutil._use_fd_functions = False


if __name__ == "__main__":
    remove_posix()
    import tcm

    for module in pkgutil.walk_packages(tcm.__path__, "tcm."):
        importlib.import_module(module.name)

    from tcm.cli import main
    from tcm.foundation.devices import free_memory, peak_memory

    assert free_memory(torch.device("cpu")) > 0
    assert peak_memory(torch.device("cpu")) == 0
    sys.argv[0] = "tcm"
    main()
