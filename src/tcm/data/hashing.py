"""Content hashes that are computed once: kept next to the data, and reused while its files stay the same."""

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import PIL

from tcm.data.dataset import Dataset
from tcm.data.pictures import Pictures
from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import data_folder
from tcm.foundation.files import read_regular, write_text

KEPT = ".tcm-hashes.json"
SETTLED = 2 * 10**9
"""Nanoseconds for which a file must not have changed: some file systems count its time of change in seconds."""
_ANSWER = "from tcm.data.hashing import answer; answer()"


@dataclass(frozen=True)
class _Fingerprint:
    """What stands for data that are not read: their files' names, sizes and times of change."""

    folder: Path
    """The folder that all files are in."""
    key: str
    newest: int
    """When a file was last changed, in nanoseconds."""

    @property
    def settled(self) -> bool:
        """Whether a further change would show."""
        return time.time_ns() - self.newest >= SETTLED


def hash_of(dataset: Dataset) -> str:
    """A data set's `content_hash()`: looked up if its files have not changed since it was computed, else computed.

    It is kept in the data's own folder, or in the cache folder if that cannot be written.

    >>> hash_of(open_dataset("imagenet64.zip"))  # doctest: +SKIP
    """
    before = _fingerprint(dataset)
    known = None if before is None or not before.settled else _look_up(before)
    if known is not None:
        return known
    found = dataset.content_hash()
    if before is not None and before.settled and _fingerprint(dataset) == before:
        _keep(before, found)
    return found


def files_of(source: Dataset | Pictures) -> str | None:
    """What shows without reading data that they are the same; None for images in memory, whose hash is quick.

    Of files whose names are not known, it is the number of images and their annotations.
    """
    if isinstance(source, Dataset) and source.in_memory and source.stored() is None:
        return None
    found = _fingerprint(source, decoder="")
    return _described(source, "", "").hexdigest() if found is None else found.key


def content_of(source: Dataset | Pictures) -> str:
    """The hash of a data set's images and annotations, or of pictures' names, bytes and annotations."""
    return hash_of(source) if isinstance(source, Dataset) else source.content_hash()


def _described(source: Dataset | Pictures, part: str, decoder: str) -> "hashlib._Hash":
    """All that is known of data besides their files."""
    known: list[object] = [*source.names] if isinstance(source, Pictures) else [source.count, source.shape]
    if isinstance(source, Dataset):
        known.append([broken.name for broken in source.skipped])
    digest = hashlib.sha256(json.dumps([*known, part, decoder]).encode())
    digest.update(b"" if source.annotations is None else source.annotations.content())
    return digest


def _fingerprint(source: Dataset | Pictures, decoder: str = PIL.__version__) -> _Fingerprint | None:
    """None for images whose files are not known, such as those in memory, whose hash takes no decoding.

    The decoder is Pillow's version: not all of them decode a JPEG to the same pixels.
    """
    stored = source.stored()
    paths = [] if stored is None else [os.path.abspath(file) for file in stored.files]
    if stored is None or not paths:
        return None
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    digest = _described(source, stored.part, decoder)
    newest = 0
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            return None
        newest = max(newest, status.st_mtime_ns)
        line = json.dumps([os.path.relpath(path, folder), status.st_size, status.st_mtime_ns])
        digest.update(line.encode())
    return _Fingerprint(Path(folder), digest.hexdigest(), newest)


def _places(folder: Path) -> tuple[Path, Path]:
    """Where hashes of data in a folder are kept: there, or else in the cache."""
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()
    return folder / KEPT, data_folder() / "hashes" / f"{name}.json"


def _look_up(fingerprint: _Fingerprint) -> str | None:
    for place in _places(fingerprint.folder):
        found = _read(place).get(fingerprint.key)
        if found is not None:
            return found
    return None


def _keep(fingerprint: _Fingerprint, found: str) -> None:
    for place in _places(fingerprint.folder):
        try:
            write_text(place, json.dumps(_read(place) | {fingerprint.key: found}, indent=1))
            return
        except (TcmError, OSError):  # read-only, or full: the next folder, or it will be computed again
            continue


def _read(place: Path) -> dict[str, str]:
    try:
        content = json.loads(read_regular(place))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if re.fullmatch("[0-9a-f]{64}", str(value))}


class BackgroundHash:
    """A data set's hash, found while other work is done; leaving the block abandons it.

    Images that must be decoded are hashed by another process: a thread would compete with the work for Python's lock.

    >>> with BackgroundHash(dataset) as hashing:  # doctest: +SKIP
    ...     work()
    ...     hashing.wait(60), hashing.value, hashing.problem
    """

    def __init__(self, dataset: Dataset) -> None:
        self.value: str | None = None
        self.problem = ""
        """Why there is no value although it is done."""
        self._child: subprocess.Popen[bytes] | None = None
        if dataset.stored() is not None:
            command = [sys.executable, "-P", "-c", _ANSWER]  # -P: not what happens to lie in the working folder
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._thread = Thread(target=self._find, args=(dataset,), daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait at most this long; return whether it is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _find(self, dataset: Dataset) -> None:
        if self._child is None:
            self.value = dataset.content_hash()
            return
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self.problem = "the process that computes it has ended"
        try:
            pickle.dump(dataset, self._child.stdin)
            self._child.stdin.flush()
            self.value, self.problem = json.loads(self._child.stdout.read())
        except (OSError, ValueError):
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.kill()
            self._thread.join()
            with suppress(OSError), self._child:  # closes its pipes, of which one may be broken
                pass


def answer() -> None:
    """Read a data set from the standard input and write its hash, or what is wrong, to the standard output."""
    if sys.platform != "win32":
        os.nice(10)
    dataset = pickle.load(sys.stdin.buffer)
    Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        found: tuple[str | None, str] = (hash_of(dataset), "")
    except (TcmError, OSError) as error:
        found = (None, str(error))
    print(json.dumps(found), flush=True)


def _end_with_the_parent() -> None:
    while os.read(0, 1):  # nothing more comes: it ends when the parent closes it, or dies
        pass
    os._exit(1)
