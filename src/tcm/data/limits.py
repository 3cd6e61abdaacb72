"""Limits on what a file may claim to hold."""

import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable
from mimetypes import guess_type
from pathlib import Path, PurePosixPath

from tcm.foundation.errors import TcmError, TcmWarning

MEGABYTE = 2**20
LARGEST_FILE = 256 * MEGABYTE
_FREE_EXPANSION = 64 * MEGABYTE
_LARGEST_RATIO = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_expansion(name: str, declared: int, stored: int) -> None:
    """Refuse a compressed file that claims to grow more than 200-fold (beyond 64 MB): real images never do."""
    if declared > max(_FREE_EXPANSION, _LARGEST_RATIO * stored):
        raise TcmError(
            f"{name} claims to unpack from {stored:,} to {declared:,} bytes, more than {_LARGEST_RATIO}-fold; "
            "it looks like a decompression bomb: if you trust the data, store it uncompressed"
        )


def check_zip_entry(path: Path, entry: zipfile.ZipInfo, length: int) -> None:
    """Refuse what an entry of a zip of `length` bytes claims if it is false or could not be read within bounds."""
    name = f"{path}/{entry.filename}"
    if not is_one_line(entry.filename):
        raise TcmError(f"{path} holds a file with the name {entry.filename!r}; pack it again with plain names")
    if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TcmError(f"{name} is encrypted or compressed in an unusual way; pack it again (stored or deflated)")
    # zipfile allocates what an entry claims before it reads; a claim may be no longer than the file itself.
    if entry.header_offset + entry.compress_size > length:
        raise TcmError(
            f"{name} claims {entry.compress_size:,} bytes, more than the file has; copy or download it again"
        )
    check_expansion(name, entry.file_size, entry.compress_size)


def is_hidden(name: str) -> bool:
    """Say whether a file is hidden, or an archiver's metadata."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/") if part not in (".", ".."))


def warn_of_unread(names: Iterable[str], known: Collection[str], where: str) -> None:
    """Warn, by their endings, of files beside images that are neither images nor texts."""
    endings = (PurePosixPath(name).suffix.lower() for name in names if not is_hidden(name))
    count = Counter(ending for ending in endings if ending and ending not in known and not _is_text(ending))
    if count:
        said = ", ".join(f"{number:,} {ending}" for ending, number in count.most_common(5))
        warnings.warn(
            f"{where}: skipped {said}, which cannot be read here; convert them to .png or .jpg, or remove them",
            TcmWarning,
            stacklevel=4,
        )


def _is_text(ending: str) -> bool:
    kind = guess_type(f"a{ending}")[0] or ""
    return kind.startswith("text/") or kind == "application/json" or ending in (".jsonl", ".toml", ".yaml", ".yml")


def is_one_line(name: str) -> bool:
    """Say whether a name has no control characters."""
    return _CONTROL.search(name) is None
