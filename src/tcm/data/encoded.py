"""Latents, and perhaps embeddings of the captions, that were computed ahead: a folder of numbered parts.

dataset.json               what the latents are of, which autoencoder and text encoder made them, images per part
part-000000/latents.npy    float16 [n, C, H, W]
part-000000/captions.json, labels.npy, tokens.npy (float16 [n, tokens, width]), mask.npy: what there is of them
"""

import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from tcm.data.captions import Captions, shown_captions
from tcm.data.dataset import Annotations, ClassLabels, Dataset, Indices, Pixels, Stored
from tcm.data.labels import DATASET_JSON
from tcm.data.limits import LARGEST_FILE
from tcm.foundation.errors import TcmError, describe_validation
from tcm.foundation.files import open_regular, read_regular
from tcm.method.conditions import ConditionKind, TextEmbeddings
from tcm.text.autoencoders import Latents
from tcm.text.condition import Texts

LATENTS, LABELS, CAPTIONS, TOKENS, MASK = "latents.npy", "labels.npy", "captions.json", "tokens.npy", "mask.npy"
NULL = "null.npz"


class Contents(BaseModel):
    """dataset.json."""

    model_config = ConfigDict(frozen=True)

    parts: tuple[int, ...]
    shape: tuple[int, int, int]
    latents: Latents
    class_names: tuple[str, ...] = ()
    texts: Texts | None = None


def is_encoded(folder: Path) -> bool:
    """Whether this folder holds latents."""
    return (folder / DATASET_JSON).is_file() and (folder / "part-000000" / LATENTS).is_file()


def open_encoded(folder: Path) -> "EncodedDataset":
    """The latents in a folder."""
    source = folder / DATASET_JSON
    try:
        contents = Contents.model_validate_json(read_regular(source))
    except ValidationError as error:
        raise describe_validation(error, str(source), Contents) from error
    return EncodedDataset(folder, contents)


class EncodedDataset(Dataset):
    """Latents by index (float16), mapped from their files, with their annotations."""

    def __init__(self, folder: Path, contents: Contents):
        self._rows = _Rows(folder, contents.parts)
        self.latents = contents.latents
        first = self._rows.open(LATENTS, 0)
        if first.dtype != np.float16 or first.shape[1:] != contents.shape:
            raise TcmError(f"{folder} holds latents of shape {list(first.shape[1:])}, not {list(contents.shape)}")
        super().__init__(sum(contents.parts), contents.shape, _annotations(self._rows, contents))

    def pixels(self, indices: Indices) -> Pixels:
        """Return the latents at `indices`; not uint8, as those of images are."""
        return cast(Pixels, self._rows.read(LATENTS, indices))

    def stored(self) -> Stored | None:
        """Return the files of the latents and of all that belongs to them."""
        return Stored(self._rows.files())


def steered(dataset: Dataset, expected: ConditionKind | None) -> Dataset:
    """The data set, with the negative prompt that is `expected`, if its embeddings are stored."""
    if isinstance(expected, Texts) and expected.negative and isinstance(dataset.annotations, StoredTexts):
        dataset.annotations.against(expected.negative)
    return dataset


class StoredTexts(Annotations):
    """Captions whose embeddings were computed ahead."""

    def __init__(self, rows: "_Rows", captions: Sequence[str], kind: Texts):
        self._rows, self._captions, self._kind = rows, captions, kind
        path = rows.folder / NULL
        try:
            with open_regular(path) as file, np.load(file, allow_pickle=False) as null:
                self._null = torch.from_numpy(null["tokens"]), torch.from_numpy(null["mask"])
        except (OSError, ValueError, EOFError, LookupError, TypeError, MemoryError, zipfile.BadZipFile) as error:
            raise TcmError(f"{path} cannot be read ({error}); prepare the data again") from error

    @property
    def kind(self) -> Texts:
        return self._kind

    @property
    def texts(self) -> Sequence[str]:
        return self._captions

    def __len__(self) -> int:
        return len(self._captions)

    def select(self, indices: Indices) -> Captions:
        return Captions([self._captions[index] for index in indices])

    def condition(self, indices: Indices) -> TextEmbeddings:
        tokens, mask = (torch.from_numpy(self._rows.read(name, indices)) for name in (TOKENS, MASK))
        return TextEmbeddings(tokens, mask, *self._null)

    def against(self, negative: str) -> None:
        """Let this text stand for no text, instead of the empty one whose embedding is stored."""
        null = replace(self._kind, negative=negative).encode([])
        self._null = null.null_tokens.half(), null.null_mask

    def content(self) -> bytes:
        return Captions(self._captions).content() + self._kind.encoder_hash.encode()


class _Rows:
    """Rows of the arrays of all parts, by their index in the whole."""

    def __init__(self, folder: Path, counts: Sequence[int]):
        self.folder, self._starts = folder, np.cumsum([0, *counts])

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}"

    def files(self) -> Iterator[Path]:
        return (path for number in range(len(self._starts) - 1) for path in sorted(self.part(number).iterdir()))

    def open(self, name: str, number: int) -> NDArray[Any]:
        """An array of one part, mapped."""
        path = self.part(number) / name
        try:
            open_regular(path).close()
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise TcmError(f"{path} cannot be read ({error}); prepare the data again") from error
        expected = int(self._starts[number + 1] - self._starts[number])
        if len(found) != expected:
            raise TcmError(f"{path} has {len(found)} rows instead of {expected}; prepare the data again")
        return found

    def read(self, name: str, indices: Indices) -> NDArray[Any]:
        """These rows, in this order."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        opened = {number: self.open(name, number) for number in np.unique(numbers).tolist()}
        rows = [opened[number][index - self._starts[number]] for number, index in zip(numbers, indices, strict=True)]
        return np.stack(rows) if rows else self.open(name, 0)[:0]

    def captions(self) -> list[str]:
        texts: list[str] = []
        for number in range(len(self._starts) - 1):
            path = self.part(number) / CAPTIONS
            try:
                texts += [str(text) for text in json.loads(read_regular(path, LARGEST_FILE))]
            except (OSError, ValueError, TypeError) as error:
                raise TcmError(f"{path} cannot be read ({error}); prepare the data again") from error
        return texts


def _annotations(rows: _Rows, contents: Contents) -> Annotations | None:
    first = rows.part(0)
    classes = None
    if (first / LABELS).exists():
        every = np.arange(sum(contents.parts))
        classes = ClassLabels.of(rows.read(LABELS, every), str(rows.folder), contents.class_names)
    if not (first / CAPTIONS).exists():
        return classes
    if contents.texts is not None:
        captions = rows.captions()
        kind = replace(contents.texts, prompts=contents.texts.prompts or shown_captions(captions))
        return StoredTexts(rows, captions, kind)
    return Captions(rows.captions(), classes)
