"""Folders that are costly to make: one worker makes each, all share it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name, in which the first worker to ask for it has called `make`; tests only read it."""
    base = factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-gw") else base) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder
