"""Files that are whole or absent, and limits on what a file may claim to hold."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from tcm.errors import TcmError

MEGABYTE = 2**20
_FREE_EXPANSION = 64 * MEGABYTE
_LARGEST_RATIO = 200


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at `path` whole or not at all: written aside, fsynced, renamed.

    >>> with atomic_write("weights.bin") as file:  # doctest: +SKIP
    ...     file.write(b"all or nothing")
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the system can (Windows cannot open folders)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_expansion(name: str, declared: int, stored: int) -> None:
    """Refuse a compressed file that claims to grow more than 200-fold (beyond 64 MB): real images never do."""
    if declared > max(_FREE_EXPANSION, _LARGEST_RATIO * stored):
        raise TcmError(
            f"{name} claims to unpack from {stored:,} to {declared:,} bytes, more than {_LARGEST_RATIO}-fold; "
            "it looks like a decompression bomb: store the data uncompressed if it is sound"
        )
