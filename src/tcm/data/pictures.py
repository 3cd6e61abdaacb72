"""Collections of image files, of any sizes: in a folder, in a zip, in tar shards. Nothing is ever unpacked to disk."""

import mmap
import os
import struct
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from PIL import Image

from tcm.data.dataset import Labels
from tcm.data.decode import EXTENSIONS, LARGEST_FILE, BrokenImage, decode_picture
from tcm.data.files import check_zip_entry, is_one_line
from tcm.data.labels import DATASET_JSON, LABELS_CSV, labels_from_csv, labels_from_folders, labels_from_json
from tcm.errors import TcmError

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


class Pictures(ABC):
    """Image files by index, with their labels; each may have its own size. Safe to use from several processes."""

    names: list[str]
    labels: Labels | None

    @abstractmethod
    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""

    def picture(self, index: int) -> Image.Image:
        """Return file `index` decoded, of mode "L" or "RGB"."""
        return decode_picture(self.data(index), self.names[index])


def is_image(name: str) -> bool:
    """Say whether a file name is that of an image: a known extension, and neither hidden nor an archiver's shadow."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts if part not in (".", ".."))
    return path.suffix.lower() in EXTENSIONS and not hidden


class FolderPictures(Pictures):
    """Image files below a folder, in sorted order."""

    def __init__(self, root: Path):
        self._root = root
        self.names = sorted(name for name in _files_below(root) if is_image(name))
        if not self.names:
            raise TcmError(f"{root} holds no images ({', '.join(sorted(EXTENSIONS))}); give the folder that holds them")
        if (root / DATASET_JSON).is_file():
            source = root / DATASET_JSON
            self.labels = labels_from_json(source.read_bytes(), self.names, str(source))
        elif (root / LABELS_CSV).is_file():
            source = root / LABELS_CSV
            self.labels = labels_from_csv(source.read_bytes(), self.names, str(source))
        else:
            self.labels = labels_from_folders(self.names, str(root))

    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        path = self._root / self.names[index]
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise BrokenImage(f"{path} has {path.stat().st_size:,} bytes; an image may have {LARGEST_FILE:,}")
            return path.read_bytes()
        except OSError as error:
            raise BrokenImage(
                f"{path} cannot be read ({error.strerror}); mend or remove it, or pass --skip-broken"
            ) from error


class ZipPictures(Pictures):
    """Image files in a zip, in sorted order; also EDM's layout. Each process opens the file for itself."""

    def __init__(self, path: Path):
        self._path = path
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        try:
            entries = {entry.filename: entry for entry in self._archive().infolist() if not entry.is_dir()}
            total = sum(not entry.is_dir() for entry in self._archive().infolist())
        except ZIP_ERRORS as error:
            raise TcmError(f"{path} is not a sound zip file ({error}); copy or download it again") from error
        if len(entries) < total:
            raise TcmError(f"{path} holds two files of the same name; pack it again")
        for entry in entries.values():
            self._check(entry)
        self.names = sorted(name for name in entries if is_image(name))
        if not self.names:
            raise TcmError(f"{path} holds no images ({', '.join(sorted(EXTENSIONS))}); give a zip that does")
        if DATASET_JSON in entries:
            self.labels = labels_from_json(self._bytes(DATASET_JSON), self.names, f"{path}/{DATASET_JSON}")
        elif LABELS_CSV in entries:
            self.labels = labels_from_csv(self._bytes(LABELS_CSV), self.names, f"{path}/{LABELS_CSV}")
        else:
            self.labels = labels_from_folders(self.names, str(path))

    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        return self._bytes(self.names[index])

    def _bytes(self, name: str) -> bytes:
        try:
            return self._archive().read(name)
        except ZIP_ERRORS as error:
            raise BrokenImage(
                f"{self._path}/{name} is damaged ({error}); pack it again, or pass --skip-broken"
            ) from error

    def _check(self, entry: zipfile.ZipInfo) -> None:
        check_zip_entry(self._path, entry)
        name = f"{self._path}/{entry.filename}"
        parts = PurePosixPath(entry.filename.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or ":" in parts.parts[0]:
            raise TcmError(f"{name} points outside of the zip; pack it again with plain relative names")
        if entry.file_size > LARGEST_FILE:
            raise TcmError(f"{name} claims {entry.file_size:,} bytes; a file may have {LARGEST_FILE:,}: remove it")

    def _archive(self) -> zipfile.ZipFile:
        # A forked worker shares its parent's file position, so that it must not use its parent's handle.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zipfile.ZipFile(self._path))
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


@dataclass(frozen=True)
class _Place:
    shard: Path
    offset: int
    size: int


class TarPictures(Pictures):
    """Image files in uncompressed WebDataset shards: `KEY.png` beside `KEY.cls`, read where they lie in the tars."""

    def __init__(self, shards: list[Path], class_names: tuple[str, ...] = ()):
        self.names = []
        self._places: list[_Place] = []
        classes: dict[str, int] = {}
        keys = []
        for shard in shards:
            for member, start in _members(shard):
                key, suffix = _key_and_suffix(member.name)
                if is_image(member.name):
                    keys.append(f"{shard}/{key}")
                    self.names.append(f"{shard.name}/{member.name}")
                    self._places.append(_Place(shard, member.offset_data, member.size))
                elif suffix == ".cls":
                    classes[f"{shard}/{key}"] = class_number(start, f"{shard}/{member.name}")
        where = str(shards[0].parent)
        if not keys:
            raise TcmError(f"the shards in {where} hold no images ({', '.join(sorted(EXTENSIONS))})")
        missing = [name for name, key in zip(self.names, keys, strict=True) if key not in classes]
        if classes and missing:
            raise TcmError(f"{missing[0]} has no .cls file beside it, as others have; add it or remove the image")
        self.labels = Labels.of([classes[key] for key in keys], where, class_names) if classes else None

    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        place = self._places[index]
        if place.size > LARGEST_FILE:
            raise BrokenImage(f"{self.names[index]} has {place.size:,} bytes; an image may have {LARGEST_FILE:,}")
        with place.shard.open("rb") as file:
            file.seek(place.offset)
            return file.read(place.size)


def class_number(text: bytes, source: str) -> int:
    """Read the number in a shard's `.cls` file."""
    if not text.strip().isdigit() or len(text) > 20:
        raise TcmError(f"{source} holds {text[:20]!r}; a .cls file holds the class as a whole number")
    return int(text)


def _members(shard: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the files in a shard, each with its first bytes (a class number is no longer)."""
    length = shard.stat().st_size
    try:
        # Mapped: a file's read allocates what a damaged header claims, a map's read only what is there.
        with (
            shard.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            tarfile.open(fileobj=cast(BinaryIO, mapped), mode="r:") as archive,
        ):
            for member in archive:
                if not is_one_line(member.name):
                    raise TcmError(
                        f"{shard} holds a file with the name {member.name!r}; pack it again with plain names"
                    )
                if member.offset_data + member.size > length:
                    raise TcmError(f"{shard} ends within {member.name}; copy or download it again")
                if member.isreg() and not member.issparse():
                    yield member, mapped[member.offset_data : member.offset_data + min(member.size, 32)]
    except TcmError:
        raise
    except TAR_ERRORS as error:
        raise TcmError(f"{shard} is not a sound, uncompressed tar file ({error}); copy or pack it again") from error


def _key_and_suffix(name: str) -> tuple[str, str]:
    folder, _, base = name.rpartition("/")
    key, dot, suffix = base.partition(".")
    return f"{folder}/{key}", dot + suffix


def _files_below(root: Path) -> Iterator[str]:
    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back up would never end
            subfolders.clear()
            continue
        seen.add(real)
        for file in files:
            yield (Path(folder) / file).relative_to(root).as_posix()
