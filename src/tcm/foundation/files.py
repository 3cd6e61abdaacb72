"""Files and folders that appear whole or not at all: written aside, synced, renamed. And files of strangers."""

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from tempfile import mkdtemp
from typing import BinaryIO
from uuid import uuid4

from tcm.foundation.errors import TcmError

LARGEST_CONFIG = 2 * 2**20
"""Bytes of a small text file that comes with a model or with data."""
LARGEST_RECORD = 2**30
"""Bytes of a file in which a run notes what it does."""
LARGEST_PICTURE = 64 * 2**20
"""Pixels of an image, and numbers that a model makes of one."""
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file that a stranger may have put there; what is no regular file is refused: it could block or never end.

    >>> open_regular("/dev/zero")
    Traceback (most recent call last):
    ...
    tcm.foundation.errors.TcmError: /dev/zero is a device, not a file; remove it, or put the file itself there
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "device")
        raise TcmError(f"{path} is a {kind}, not a file; remove it, or put the file itself there")
    # Not blocking: what was a file a moment ago may have been replaced.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))


def read_regular(path: str | Path, most: int = LARGEST_CONFIG) -> bytes:
    """The content of a regular file of at most so many bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise TcmError(f"{path} has {size:,} bytes, more than the {most:,} that such a file may have; remove it")
        return file.read(size)


def read_record(path: Path) -> str:
    """The text of a file in a run's or a study's folder, which may be a stranger's."""
    return read_regular(path, LARGEST_RECORD).decode("utf-8", "replace")


def is_full(error: BaseException) -> bool:
    """Whether there was no room left, on a disk or within a limit; some libraries say so in words alone."""
    said = re.search("No space left|quota exceeded|File too large|requested and .* written", str(error))
    return said is not None or getattr(error, "errno", None) in (ENOSPC, EDQUOT, EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What keeps a file or folder from being written as an error that the user can fix."""
    try:
        yield
    except TcmError:
        raise
    except Exception as error:  # libraries have errors of their own for a full disk
        if is_full(error):
            remedy = "free some space there, or name another place; what was there before is intact"
        elif isinstance(error, OSError) and _is_about(error, path.absolute()):
            remedy = "name a place that can be written to"
        else:
            raise
        reason = getattr(error, "strerror", None) or error
        raise TcmError(f"{path} cannot be written ({reason}); {remedy}") from error


def check_writable(path: Path) -> None:
    """Refuse a place where nothing can be written, before there is work to lose."""
    path = path.absolute()
    with writing(path):
        above = next((above for above in path.parents if above.exists()), path)
        probe = above / _aside(Path(path.name or "root")).name
        probe.touch()
        probe.unlink()


def _is_about(error: OSError, path: Path) -> bool:
    """Whether an error names a path, what is in it or above it, or what is written aside for it."""
    if not isinstance(error.filename, str | os.PathLike):
        return False
    named = Path(error.filename).absolute()
    aside = any(part.startswith(f".{path.name}.") for part in named.parts)
    return aside or named.is_relative_to(path) or path.is_relative_to(named)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid4().hex}.part")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at `path` whole or not at all.

    >>> with atomic_write("weights.bin") as file:  # doctest: +SKIP
    ...     file.write(b"all or nothing")
    """
    with written_aside(Path(path)) as aside, aside.open("xb") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a text that appears at `path` whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode())


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A name to write a file under, which becomes `path` once all is on the disk; on an error nothing changes."""
    aside = _aside(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            move(aside, path)
        finally:
            with suppress(OSError):  # it is not there, or cannot be removed where it could not be written
                aside.unlink()


def move(file: Path, path: Path) -> None:
    """Bring a file to the disk and rename it to `path`, in place of what is there."""
    _sync_file(file)
    os.replace(file, path)
    sync_folder(path.parent)


def _sync_file(file: Path) -> None:
    with file.open("r+b") as opened:  # Windows syncs only what is open for writing
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the system lets us open folders (Windows does not)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` once all is on the disk; on an error nothing changes."""
    path = path.absolute()
    with writing(path):
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
            _sync_file(inside)
    sync_folder(aside)
    if path.exists():
        old = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        path.rename(old / "old")
        try:
            aside.rename(path)
        except OSError:
            (old / "old").rename(path)
            old.rmdir()
            raise
        shutil.rmtree(old)
    else:
        aside.rename(path)
    sync_folder(path.parent)


def near_names(name: str, known: Iterable[str] = ()) -> list[str]:
    """Names like one that does not exist: among those that are known, and of files and folders where it should be.

    >>> near_names("digts", ["digits", "demo"])
    ['digits']
    """
    folder = Path(name).parent
    beside = [str(folder / path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return get_close_matches(str(Path(name)), [*known, *beside])


def byte_size(count: int) -> str:
    """A number of bytes, for people.

    >>> byte_size(29_515), byte_size(9_990_000), byte_size(467_000_000), byte_size(22_400_000_000)
    ('0.03 MB', '10 MB', '467 MB', '22.4 GB')
    """
    megabytes = count / 1e6
    if megabytes >= 999.5:
        return f"{megabytes / 1e3:.1f} GB"
    return f"{megabytes:.0f} MB" if megabytes >= 9.95 else f"{megabytes:.2g} MB"
