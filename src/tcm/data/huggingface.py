"""Hugging Face data sets: a folder written by `save_to_disk`, a folder of parquet files, or an id on the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tcm.data.caption_files import TEXT_KEYS, in_order
from tcm.data.dataset import ClassLabels, Stored
from tcm.data.decode import BrokenImage
from tcm.data.limits import LARGEST_FILE
from tcm.data.pictures import PackedNames, Pictures
from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.foundation.files import read_regular

HUB = "hf://"
SAVED_MARKS = ("dataset_dict.json", "dataset_info.json")


def load_rows(where: str, split: str) -> Any:
    """Load the rows of a split with the `datasets` library; `where` is a folder or a hub id."""
    datasets = _library()
    with _opening(where):
        if _is_saved(where):
            return _saved_rows(where, split)
        return datasets.load_dataset(where, split=split)


def stream_rows(where: str, split: str) -> tuple[Any, str | None]:
    """Open a split as a stream: a folder, or `hf://owner/name` or `hf://owner/name@revision` with its commit."""
    datasets = _library()
    with _opening(where):
        if _is_saved(where):
            rows = _saved_rows(where, split)
            return rows.to_iterable_dataset(num_shards=min(64, len(rows))), None
        if not where.startswith(HUB):
            return datasets.load_dataset(where, split=split, streaming=True), None
        name, _, revision = where.removeprefix(HUB).partition("@")
        builder = datasets.load_dataset_builder(name, revision=revision or None)
        # The hash of a data set on the hub is the commit that its files are read from.
        return builder.as_streaming_dataset(split=split), str(builder.hash)


def _is_saved(where: str) -> bool:
    return any(Path(where, mark).is_file() for mark in SAVED_MARKS)


def _saved_rows(where: str, split: str) -> Any:
    """The rows of a split in a folder that `save_to_disk` wrote."""
    datasets = _library()
    rows = datasets.load_from_disk(where)
    if not isinstance(rows, datasets.DatasetDict):
        return rows
    if split not in rows:
        raise TcmError(f"{where} has the splits {', '.join(rows)}, not {split!r}; name one of them")
    return rows[split]


@contextmanager
def _opening(where: str) -> Iterator[None]:
    try:
        yield
    except TcmError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TcmError(
            f"{where} cannot be opened as a Hugging Face data set ({reason}); check its name or path"
        ) from error


def image_column(rows: Any, where: str) -> str:
    """Find the one column of images."""
    found = [name for name, feature in rows.features.items() if isinstance(feature, _library().Image)]
    if len(found) != 1:
        raise TcmError(
            f"{where} has the columns {', '.join(rows.features)}, of which {len(found)} hold images; exactly one must"
        )
    return str(found[0])


def label_column(rows: Any) -> tuple[str, tuple[str, ...]] | None:
    """Find the first column of classes and their names, or a column of integers called label (without names)."""
    datasets = _library()
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.ClassLabel):
            return str(name), tuple(feature.names)
    for name in ("label", "labels"):
        feature = rows.features.get(name)
        if isinstance(feature, datasets.Value) and "int" in feature.dtype:
            return name, ()
    return None


def text_column(rows: Any) -> str | None:
    """Find the column of captions: one of a usual name, or the only one of texts."""
    texts = [
        name
        for name, feature in rows.features.items()
        if isinstance(feature, _library().Value) and feature.dtype in ("string", "large_string")
    ]
    named = next((name for name in TEXT_KEYS if name in texts), None)
    return named or (str(texts[0]) if len(texts) == 1 else None)


def encoded_bytes(cell: Any, name: str) -> bytes:
    """Return the file's bytes in a cell of an undecoded image column."""
    if cell is None or (cell["bytes"] is None and cell["path"] is None):
        raise BrokenImage(f"{name} has no image", "remove the row")
    try:
        return bytes(cell["bytes"]) if cell["bytes"] is not None else read_regular(cell["path"], LARGEST_FILE)
    except (OSError, TcmError) as error:
        raise BrokenImage(f"{name} names an image that cannot be read ({error})", "put it there") from error


class RowPictures(Pictures):
    """The images in the rows of a Hugging Face data set; read from its memory-mapped tables."""

    def __init__(self, where: str, split: str):
        rows = load_rows(where, split)
        if len(rows) == 0:
            raise TcmError(f"{where} has no rows in split {split!r}; name another split")
        self._split = split
        self._column = image_column(rows, where)
        self._rows = without_decoding(rows, self._column)
        self.names = PackedNames(f"{where} row {row}" for row in range(len(rows)))
        column = label_column(rows)
        classes = ClassLabels.of(np.array(rows[column[0]][:]), where, column[1]) if column else None
        texts = text_column(rows)
        captions = {} if texts is None else dict(zip(self.names, (text or "" for text in rows[texts]), strict=True))
        self.annotations = in_order(captions, self.names, where, classes) if captions else classes

    def stored(self) -> Stored | None:
        """Return the tables, unless they only name image files that lie elsewhere."""
        inside = self._rows[0][self._column]
        if inside is None or inside["bytes"] is None:
            return None
        return Stored([Path(file["filename"]) for file in self._rows.cache_files], self._split)

    def data(self, index: int) -> bytes:
        """Return the bytes of the image in row `index`."""
        return encoded_bytes(self._rows[index][self._column], self.names[index])


def without_decoding(rows: Any, column: str) -> Any:
    """Return the rows with the image column left as bytes, so that all images are decoded in one way."""
    return rows.cast_column(column, _library().Image(decode=False))


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise TcmError(f"Hugging Face data sets need more packages; {how_to_install('data')}") from error
    return datasets
