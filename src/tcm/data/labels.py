"""Labels of image files: from dataset.json, labels.csv or class folders, in this order."""

import csv
import io
import json
from collections.abc import Sequence
from typing import TypeVar

from tcm.data.dataset import ClassLabels
from tcm.foundation.errors import TcmError

_Label = TypeVar("_Label")

DATASET_JSON = "dataset.json"
LABELS_CSV = "labels.csv"


def labels_from_json(data: bytes, names: Sequence[str], source: str) -> ClassLabels | None:
    """Read EDM's `dataset.json`: {"labels": [["00000/img00000000.png", 6], ...]}, or null for no labels.

    We also write and read "class_names", which EDM's tools ignore.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TcmError(f"{source} is not valid JSON ({error}); fix or remove it") from error
    if not isinstance(content, dict):
        raise TcmError(
            f'{source} holds a {type(content).__name__}; it must be an object such as {{"labels": [["a.png", 0]]}}'
        )
    pairs = content.get("labels")
    if pairs is None:
        return None
    if isinstance(pairs, dict):
        pairs = list(pairs.items())
    if not isinstance(pairs, list) or not all(_is_name_and_number(pair) for pair in pairs):
        raise TcmError(f'{source}: "labels" must be pairs of a file name and an integer, such as ["a.png", 0]')
    class_names = content.get("class_names", [])
    if not isinstance(class_names, list) or not all(isinstance(name, str) for name in class_names):
        raise TcmError(f'{source}: "class_names" must be a list of strings')
    return ClassLabels.of(_in_order(dict(pairs), names, source), source, class_names)


def labels_from_csv(data: bytes, names: Sequence[str], source: str) -> ClassLabels:
    """Read a table with the columns `file` and `label`; labels are integers, or names (sorted)."""
    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise TcmError(f"{source} is not a CSV file in UTF-8 ({error}); fix or remove it") from error
    if not rows or rows[0].get("file") is None or rows[0].get("label") is None:
        raise TcmError(f"{source} needs a first line `file,label` and one line per image")
    found = {row["file"]: (row["label"] or "").strip() for row in rows}
    values = _in_order(found, names, source)
    if all(value.isascii() and value.isdigit() and len(value) < 8 for value in values):
        return ClassLabels.of([int(value) for value in values], source)
    return _numbered(values, source)


def labels_from_folders(names: Sequence[str], source: str) -> ClassLabels | None:
    """Take each file's first folder as its class, in sorted order; fewer than two folders give no labels."""
    inside = [name for name in names if "/" in name]
    if not inside:
        return None
    if len(inside) < len(names):
        outside = next(name for name in names if "/" not in name)
        raise TcmError(
            f"{source}: {outside} is not in a class folder, but {inside[0]} is; move it into one, or list all labels "
            f"in {LABELS_CSV} (file,label)"
        )
    folders = [name.split("/", 1)[0] for name in names]
    return _numbered(folders, source) if len(set(folders)) > 1 else None


def _numbered(classes: Sequence[str], source: str) -> ClassLabels:
    names = sorted(set(classes))
    if "" in names:
        raise TcmError(f"{source}: some files have an empty label; give every file a label")
    numbers = {name: number for number, name in enumerate(names)}
    return ClassLabels.of([numbers[name] for name in classes], source, names)


def _in_order(found: dict[str, _Label], names: Sequence[str], source: str) -> list[_Label]:
    missing = [name for name in names if name not in found]
    if missing:
        raise TcmError(f"{source} has no label for {missing[0]} ({len(missing)} such files); add it or remove the file")
    absent = sorted(found.keys() - set(names))
    if absent:
        raise TcmError(f"{source} names {absent[0]}, which does not exist ({len(absent)} such files); remove its line")
    return [found[name] for name in names]


def _is_name_and_number(pair: object) -> bool:
    return (
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], int)
        and not isinstance(pair[1], bool)
    )
