"""Image files in a zip, read by an index that takes a few bytes for each and that all processes share.

`zipfile` keeps an object of half a kilobyte for each file: almost a gigabyte for ImageNet, in every process that opens
it. So it reads the zip's directory once and is closed; what is kept are plain arrays, which forked processes share.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tcm.data.dataset import Stored
from tcm.data.decode import EXTENSIONS, BrokenImage
from tcm.data.limits import LARGEST_FILE, check_zip_entry, warn_of_unread
from tcm.data.pictures import ANNOTATION_FILES, ZIP_ERRORS, PackedNames, Pictures, annotations_of, is_image
from tcm.foundation.errors import TcmError

_ENTRY = np.dtype(
    [("start", "<i8"), ("stored", "<i8"), ("size", "<i8"), ("crc", "<u4"), ("name_crc", "<u4"), ("deflated", "?")]
)
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The signature, then the lengths of the name and of the extra field."""
_UTF8_NAME = 0x800


class ZipPictures(Pictures):
    """Image files in a zip, in sorted order; also EDM's layout. Each process opens the file for itself."""

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        self._path = path
        self._opened: tuple[int, BinaryIO] | None = None
        files = {entry.filename: entry for entry in archive.infolist() if not entry.is_dir()}
        if len(files) < sum(not entry.is_dir() for entry in archive.infolist()):
            raise TcmError(f"{path} holds two files of the same name; pack it again")
        length = path.stat().st_size
        for entry in files.values():
            _check(path, entry, length)
        warn_of_unread(files, EXTENSIONS, str(path))
        names = sorted(name for name in files if is_image(name))
        if not names:
            raise TcmError(f"{path} holds no images ({', '.join(sorted(EXTENSIONS))}); give a zip that does")
        present = [file for file in ANNOTATION_FILES if file in files]
        self.annotations = annotations_of(
            present, lambda file: self._undamaged(file, lambda: archive.read(file)), names, str(path)
        )
        self.names = PackedNames(names)
        self._entries = np.array([_fields(files[name]) for name in names], _ENTRY)
        _check_overlap(path, self._entries)

    def stored(self) -> Stored | None:
        """Return the zip."""
        return Stored([self._path])

    def data(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        return self._undamaged(self.names[index], lambda: _read(self._file(), self._entries[index]))

    def _undamaged(self, name: str, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except ZIP_ERRORS as error:
            raise BrokenImage(f"{self._path}/{name} is damaged ({error})", "pack it again") from error

    def _file(self) -> BinaryIO:
        # A forked worker shares its parent's file position, so that it must not use its parent's handle.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._path.open("rb"))
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def _fields(entry: zipfile.ZipInfo) -> tuple[int, int, int, int, int, bool]:
    """What reading needs of an entry of the directory, in the order of the index."""
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8_NAME else "cp437")
    deflated = entry.compress_type == zipfile.ZIP_DEFLATED
    return entry.header_offset, entry.compress_size, entry.file_size, entry.CRC, zlib.crc32(name), deflated


def _read(file: BinaryIO, entry: NDArray[np.void]) -> bytes:
    """Read one file; everything that its header, its size and its sum say must agree with the directory."""
    start, stored, size, crc, name_crc, deflated = entry.item()
    file.seek(start)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04" or zlib.crc32(file.read(name_length)) != name_crc:
        raise zipfile.BadZipFile("the directory and the file's own header differ")
    file.seek(extra_length, os.SEEK_CUR)
    data = file.read(stored)
    if deflated:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)  # never much more than it claims
    if len(data) != size or zlib.crc32(data) != crc:
        raise zipfile.BadZipFile("its size or its checksum is wrong")
    return data


def _check(path: Path, entry: zipfile.ZipInfo, length: int) -> None:
    check_zip_entry(path, entry, length)
    name = entry.filename.replace("\\", "/")
    parts = PurePosixPath(name).parts if ".." in name or ":" in name else ()
    if name.startswith("/") or ".." in parts or (parts and ":" in parts[0]):
        raise TcmError(f"{path}/{entry.filename} points outside the zip; pack it again with plain relative names")
    if entry.file_size > LARGEST_FILE:
        raise TcmError(
            f"{path}/{entry.filename} claims {entry.file_size:,} bytes; a file may have at most {LARGEST_FILE:,}: "
            "remove it"
        )


def _check_overlap(path: Path, entries: NDArray[np.void]) -> None:
    """Refuse files that share bytes: a small zip could pretend to hold any number of images."""
    in_order = entries[np.argsort(entries["start"], kind="stable")]
    ends = in_order["start"] + _LOCAL_HEADER.size + in_order["stored"]
    if (in_order["start"][1:] < ends[:-1]).any():
        raise TcmError(f"{path} has overlapping entries, like a decompression bomb; pack it again")
