"""Captioned emoji: from the files of the npm package `emoji-datasource-google` to images of 32 × 32 with their names.

The images (Noto Emoji) are under Apache-2.0, the names under MIT.
"""

import hashlib
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from tcm.data.captions import Captions
from tcm.data.dataset import ArrayDataset, ClassLabels, Dataset, Pixels
from tcm.data.decode import decode_picture, pixels_of
from tcm.foundation.errors import TcmError

PACKAGE = "emoji-datasource-google@16.0.0"
HELD_OUT = 20
"""One emoji in so many is kept out of the training split."""
_LIST = "package/emoji.json"
_IMAGES = "package/img/google/64"


def emoji_splits(archive: Path) -> dict[str, Dataset]:
    """Read the package: one image for each emoji, without the variants of skin colour; one in twenty is for testing."""
    try:
        with tarfile.open(archive) as package:
            files = {member.name: member for member in package}
            entries = json.loads(_read(package, files, _LIST))
            images = [_halved(_read(package, files, f"{_IMAGES}/{entry['image']}")) for entry in entries]
    except (tarfile.TarError, OSError, EOFError, KeyError, ValueError) as error:
        raise TcmError(f"{archive.name} arrived damaged ({error})") from error
    names = sorted({entry["category"] for entry in entries})
    classes = ClassLabels.of([names.index(entry["category"]) for entry in entries], _LIST, names)
    everything = ArrayDataset(np.stack(images), Captions([caption(entry) for entry in entries], classes))
    held_out = np.array([is_held_out(entry["unified"]) for entry in entries])
    return {"train": _part(everything, ~held_out), "test": _part(everything, held_out)}


def caption(entry: dict[str, Any]) -> str:
    """What an emoji shows: its name in Unicode, and its short name if that has other words.

    >>> caption({"name": "FACE WITH TEARS OF JOY", "short_name": "joy", "category": "Smileys & Emotion"})
    'face with tears of joy'
    >>> caption({"name": "HEAVY BLACK HEART", "short_name": "red_heart", "category": "Symbols"})
    'heavy black heart, red heart'
    """
    name = " ".join(re.sub(r"[^\w&'-]+", " ", entry["name"].lower()).split())
    short = re.split(r"[_-]+", entry["short_name"])
    words = set(re.split(r"[ -]", name))
    readable = all(word.isalpha() and len(word) > 2 for word in short)
    is_new = entry["category"] != "Flags" and readable and not words.issuperset(short)
    return f"{name}, {' '.join(short)}" if is_new else name


def is_held_out(code: str) -> bool:
    """Whether an emoji is kept out of the training split; this depends on its code point alone."""
    return int.from_bytes(hashlib.sha256(code.encode()).digest()[:8], "big") % HELD_OUT == 0


def _part(dataset: ArrayDataset, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Dataset:
    indices = np.flatnonzero(chosen)
    assert dataset.annotations is not None
    return ArrayDataset(dataset.pixels(indices), dataset.annotations.select(indices))


def _halved(data: bytes) -> Pixels:
    """The image on white, at 32 × 32: the means of 2 × 2 pixels, rounded."""
    pixels = pixels_of(decode_picture(data, "emoji"), 3).astype(np.uint16)
    channels, height, width = pixels.shape
    sums = pixels.reshape(channels, height // 2, 2, width // 2, 2).sum((2, 4), dtype=np.uint16)
    return ((sums + 2) // 4).astype(np.uint8)


def _read(package: tarfile.TarFile, files: dict[str, tarfile.TarInfo], name: str) -> bytes:
    opened = package.extractfile(files[name])
    if opened is None:
        raise KeyError(name)
    return opened.read()
