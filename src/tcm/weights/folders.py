"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from tcm.data.files import sync_folder


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` once all is on the disk; on an error nothing changes."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        aside.chmod(0o755)
        yield aside
        publish(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def publish(aside: Path, path: Path) -> None:
    """Bring the folder `aside` to the disk and rename it to `path`, in place of what is there."""
    for inside in aside.rglob("*"):
        inside.chmod(0o755 if inside.is_dir() else 0o644)
        if inside.is_dir():
            sync_folder(inside)
        else:
            with inside.open("r+b") as file:  # Windows syncs only what is open for writing
                os.fsync(file.fileno())
    sync_folder(aside)
    if path.exists():
        old = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        path.rename(old / "old")
        aside.rename(path)
        shutil.rmtree(old)
    else:
        aside.rename(path)
    sync_folder(path.parent)
