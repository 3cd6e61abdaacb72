"""Captions of image files: from captions.csv, metadata.jsonl, or the text beside an image in a shard."""

import csv
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tcm.data.captions import Captions
from tcm.data.dataset import ClassLabels
from tcm.foundation.errors import TcmError, TcmWarning

CAPTIONS_CSV = "captions.csv"
METADATA_JSONL = "metadata.jsonl"
CAPTION_FILES = (CAPTIONS_CSV, METADATA_JSONL)
FILE_KEYS = ("file_name", "file")
TEXT_KEYS = ("text", "caption", "prompt")
EMBEDDING = "tokens.npy"
"""The ending of the file beside an image in a shard that holds its caption's embedding."""
MOST_MISSING = 0.1
"""The share of images that may lack a caption; they count as images without a text."""


def captions_from(file: str, data: bytes, names: Sequence[str], source: str, classes: ClassLabels | None) -> Captions:
    """Read one of the `CAPTION_FILES`: a caption for each image, by its file name."""
    found = _from_csv(data, source) if file == CAPTIONS_CSV else _from_jsonl(data, source)
    absent = sorted(found.keys() - set(names))
    if absent:
        raise TcmError(
            f"{source} names {len(absent):,} files that do not exist, such as {absent[0]}; remove their lines"
        )
    return in_order(found, names, source, classes)


def in_order(
    found: Mapping[str, str], names: Sequence[str], source: str, classes: ClassLabels | None = None
) -> Captions:
    """The captions of these images, empty where one is missing; a warning counts them, and too many are an error."""
    texts = [found.get(name, "") for name in names]
    missing = [name for name, text in zip(names, texts, strict=True) if not text]
    if len(missing) > MOST_MISSING * len(names):
        raise TcmError(
            f"{source} has no caption for {len(missing):,} of {len(names):,} images, such as {missing[0]}; add them or "
            "remove the images"
        )
    if missing:
        warnings.warn(
            f"{source} has no caption for {len(missing):,} of {len(names):,} images, such as {missing[0]}; they count "
            "as images without a text",
            TcmWarning,
            stacklevel=5,
        )
    return Captions(texts, classes)


def caption_of(members: Mapping[str, bytes]) -> str | None:
    """The caption among the files of one sample: its `txt`, else the caption in its `json` (as img2dataset writes)."""
    text: str | None = None
    if "txt" in members:
        text = members["txt"].decode("utf-8", "replace")
    elif "json" in members:
        with suppress(ValueError, RecursionError):
            table = json.loads(members["json"])
            text = _first_text(table, TEXT_KEYS) if isinstance(table, dict) else None
    return " ".join(text.split()) or None if text else None


def _from_csv(data: bytes, source: str) -> dict[str, str]:
    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise TcmError(f"{source} is not a CSV file in UTF-8 ({error}); fix or remove it") from error
    return _by_name([dict(row) for row in rows], source, "needs a first line `file,caption` and one line per image")


def _from_jsonl(data: bytes, source: str) -> dict[str, str]:
    try:
        rows = [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise TcmError(f"{source} is not a file with one JSON object per line ({error}); fix or remove it") from error
    return _by_name(rows, source, 'needs lines such as {"file_name": "a.png", "text": "a red apple"}')


def _by_name(rows: list[object], source: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in rows:
        name = _first_text(row, FILE_KEYS) if isinstance(row, dict) else None
        if name is None or not any(key in row for key in TEXT_KEYS):  # type: ignore[operator]
            raise TcmError(f"{source} {form}; correct {str(row)[:80]}")
        found[name] = " ".join((_first_text(row, TEXT_KEYS) or "").split())
    if not found:
        raise TcmError(f"{source} {form}; it is empty")
    return found


def _first_text(table: object, keys: Sequence[str]) -> str | None:
    assert isinstance(table, dict)
    return next((table[key] for key in keys if isinstance(table.get(key), str)), None)
