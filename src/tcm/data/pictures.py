"""Collections of image files, of any sizes: in a folder, in tar shards. Nothing is ever unpacked to disk."""

import hashlib
import json
import mmap
import os
import struct
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast, overload

import numpy as np
from PIL import Image

from tcm.data.caption_files import CAPTION_FILES, caption_of, captions_from, in_order
from tcm.data.dataset import Annotations, ClassLabels, Stored
from tcm.data.decode import EXTENSIONS, BrokenImage, decode_picture
from tcm.data.labels import DATASET_JSON, LABELS_CSV, labels_from_csv, labels_from_folders, labels_from_json
from tcm.data.limits import LARGEST_FILE, is_hidden, warn_of_unread
from tcm.data.shards import is_plain, most_bytes, shard_samples
from tcm.foundation.errors import TcmError
from tcm.foundation.files import open_regular, read_regular

ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    IndexError,
)
TAR_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, struct.error)


class PackedNames(Sequence[str]):
    """Names as one block of text, which forked processes share.

    A list of a million strings takes 100 MB, and looking at a string copies its page into the process that looks.

    >>> names = PackedNames(["a.png", "ö.png", ""])
    >>> names[1], len(names), list(names)
    ('ö.png', 3, ['a.png', 'ö.png', ''])
    """

    def __init__(self, names: Iterable[str]):
        # What a file system holds need not be valid text; such names must come back as they were.
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        self._text = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].tobytes().decode("utf-8", "surrogatepass")


class Pictures(ABC):
    """Image files by index, with their annotations; each may have its own size. Safe to use from several processes."""

    names: Sequence[str]
    annotations: Annotations | None

    @abstractmethod
    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""

    @abstractmethod
    def stored(self) -> Stored | None:
        """Return the files that hold the pictures; None if that cannot be said."""

    def picture(self, index: int) -> Image.Image:
        """Return file `index` decoded, of mode "L" or "RGB"."""
        return decode_picture(self.data(index), self.names[index])

    def content_hash(self) -> str:
        """Return the SHA-256 of all names, bytes and annotations; a file that cannot be read counts as empty."""
        digest = hashlib.sha256()
        for index, name in enumerate(self.names):
            data = b""
            with suppress(BrokenImage):
                data = self.data(index)
            digest.update(json.dumps([name, len(data)]).encode() + data)
        digest.update(b"" if self.annotations is None else self.annotations.content())
        return digest.hexdigest()


def is_image(name: str) -> bool:
    """Say whether a file name is that of an image: a known extension, and neither hidden nor an archiver's metadata."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS and not is_hidden(name)


class FolderPictures(Pictures):
    """Image files below a folder, in sorted order."""

    def __init__(self, root: Path):
        self._root = root
        present = sorted(_files_below(root))
        warn_of_unread(present, EXTENSIONS, str(root))
        names = [name for name in present if is_image(name)]
        if not names:
            raise TcmError(f"{root} holds no images ({', '.join(sorted(EXTENSIONS))}); give the folder that holds them")
        present = [file for file in ANNOTATION_FILES if os.path.lexists(root / file)]
        self.annotations = annotations_of(present, lambda file: _annotation(root / file), names, str(root))
        self.names = PackedNames(names)

    def stored(self) -> Stored | None:
        """Return all files."""
        return Stored(self._root / name for name in self.names)

    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        path = self._root / self.names[index]
        try:
            return read_regular(path, LARGEST_FILE)
        except OSError as error:
            raise BrokenImage(f"{path} cannot be read ({error.strerror})") from error
        except TcmError as error:
            raise BrokenImage(str(error).rpartition("; ")[0]) from error


STAGE_MARK, STAGE_FOLDERS = "starts.jsonl", ("samples", "state", "model", "roles")
"""What is in the folder of each stage of a run."""

ANNOTATION_FILES = (DATASET_JSON, LABELS_CSV, *CAPTION_FILES)
"""The files beside images that say what is in them."""


def annotations_of(
    present: Sequence[str], read: Callable[[str], bytes], names: Sequence[str], where: str
) -> Annotations | None:
    """What the files of these names, beside images, say about them; without any, folders are classes."""
    classes = None
    if DATASET_JSON in present:
        classes = labels_from_json(read(DATASET_JSON), names, f"{where}/{DATASET_JSON}")
    elif LABELS_CSV in present:
        classes = labels_from_csv(read(LABELS_CSV), names, f"{where}/{LABELS_CSV}")
    captions = next((file for file in CAPTION_FILES if file in present), None)
    if captions is not None:
        return captions_from(captions, read(captions), names, f"{where}/{captions}", classes)
    return classes if present else labels_from_folders(names, where)


def _annotation(path: Path) -> bytes:
    try:
        return read_regular(path, LARGEST_FILE)
    except OSError as error:
        raise TcmError(f"{path} cannot be read ({error.strerror}); fix or remove it") from error


class TarPictures(Pictures):
    """Image files in uncompressed WebDataset shards: `KEY.png` next to `KEY.cls`, `KEY.txt` or `KEY.json`."""

    def __init__(self, shards: list[Path], class_names: tuple[str, ...] = ()):
        self._shards = shards
        names, extents, keys = [], [], []
        classes: dict[str, int] = {}
        captions: dict[str, str] = {}
        for number, shard in enumerate(shards):
            for sample in shard_samples(_members(shard), str(shard)):
                key, (image, _) = f"{shard}/{sample.key}", sample.files[sample.image]
                keys.append(key)
                names.append(f"{shard.name}/{image.name}")
                extents.append((number, image.offset_data, image.size))
                starts = {suffix: start for suffix, (_, start) in sample.files.items()}
                if "cls" in starts:
                    classes[key] = class_number(starts["cls"], f"{key}.cls")
                if text := caption_of(starts):
                    captions[key] = text
        where = str(shards[0].parent)
        if not keys:
            raise TcmError(
                f"the shards in {where} hold no images ({', '.join(sorted(EXTENSIONS))}); give shards that do"
            )
        missing = [name for name, key in zip(names, keys, strict=True) if key not in classes]
        if classes and missing:
            raise TcmError(f"{missing[0]} has no .cls file, though other images have one; add it or remove the image")
        labels = ClassLabels.of([classes[key] for key in keys], where, class_names) if classes else None
        self.annotations = in_order(captions, keys, where, labels) if captions else labels
        self.names = PackedNames(names)
        self._extents = np.array(extents, np.int64)

    def stored(self) -> Stored | None:
        """Return the shards."""
        return Stored(self._shards)

    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        shard, offset, size = self._extents[index].tolist()
        if size > LARGEST_FILE:
            raise BrokenImage(f"{self.names[index]} has {size:,} bytes; an image may have at most {LARGEST_FILE:,}")
        with open_regular(self._shards[shard]) as file:
            file.seek(offset)
            return file.read(size)


def class_number(text: bytes, source: str) -> int:
    """Read the number in a shard's `.cls` file."""
    if not text.strip().isdigit() or len(text) > 20:
        raise TcmError(f"{source} holds {text[:20]!r}; a .cls file holds the class as an integer")
    return int(text)


def _members(shard: Path) -> Iterator[tuple[str, tuple[tarfile.TarInfo, bytes]]]:
    """Yield the files in a shard by name; of what is short, such as a class or a caption, with the content."""
    try:
        length = shard.stat().st_size
        # Mapped: a file's read allocates what a damaged header claims, a map's read only what is there.
        with (
            open_regular(shard) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            tarfile.open(fileobj=cast(BinaryIO, mapped), mode="r:") as archive,
        ):
            for member in archive:
                if member.offset_data + member.size > length:
                    raise TcmError(f"{shard} ends within {member.name}; copy or download it again")
                if is_plain(member):
                    size = min(member.size, most_bytes(member.name, images=0))
                    yield member.name, (member, mapped[member.offset_data : member.offset_data + size])
    except TcmError:
        raise
    except TAR_ERRORS as error:
        raise TcmError(f"{shard} is not a valid, uncompressed tar file ({error}); copy or pack it again") from error


def _part_of_a_run(folder: Path) -> TcmError:
    return TcmError(
        f"{folder} is part of a run, whose pictures are no photographs; give a folder that holds only images"
    )


def _files_below(root: Path) -> Iterator[str]:
    for inside in (root.resolve(), *root.resolve().parents):
        if inside.name in STAGE_FOLDERS and (inside.parent / STAGE_MARK).is_file():
            raise _part_of_a_run(root)
    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        if STAGE_MARK in files:
            raise _part_of_a_run(Path(folder))
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back up would never end
            subfolders.clear()
            continue
        seen.add(real)
        for file in files:
            yield (Path(folder) / file).relative_to(root).as_posix()
