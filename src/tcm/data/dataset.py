"""What every data set offers, whatever it is stored in."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Classes, Condition, ConditionKind, Labels
from tcm.method.objectives import Trajectory
from tcm.text.autoencoders import Latents

CHUNK_BYTES = 2**24
"""Of images that are read together where all are needed."""

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]


class Annotations(ABC):
    """What a data set knows of each of its images besides the pixels: the condition that a model can learn."""

    @property
    @abstractmethod
    def kind(self) -> ConditionKind:
        """What a model of this data is conditioned on."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select(self, indices: Indices) -> "Annotations":
        """Return the annotations of these images."""

    @abstractmethod
    def condition(self, indices: Indices) -> Condition:
        """Return the condition of these images, as a network takes it."""

    @abstractmethod
    def content(self) -> bytes:
        """Return all of it as bytes, for the hash of the data set's content."""

    @property
    def classes(self) -> "ClassLabels | None":
        """Return the images' classes, if they have any."""
        return None

    @property
    def texts(self) -> Sequence[str] | None:
        """Return the images' captions, if they have any."""
        return None


@dataclass(frozen=True)
class ClassLabels(Annotations):
    """One class per image: `values` [n] index `names`."""

    values: NDArray[np.int64]
    names: tuple[str, ...]

    @property
    def kind(self) -> Classes:
        """Return the classes, with their names if these are more than their numbers."""
        return named_classes(self.names)

    def __len__(self) -> int:
        return len(self.values)

    def select(self, indices: Indices) -> Self:
        return type(self)(self.values[indices], self.names)

    def condition(self, indices: Indices) -> Labels:
        return Labels(torch.from_numpy(self.values[indices]))

    def content(self) -> bytes:
        return self.values.astype("<i8").tobytes()

    @property
    def classes(self) -> "ClassLabels":
        return self

    @staticmethod
    def of(values: Sequence[int] | NDArray[np.generic], source: str, names: Sequence[str] = ()) -> "ClassLabels":
        """Check raw class numbers from `source`; without names the classes are called "0", "1", ..."""
        numbers = np.asarray(values)
        if numbers.ndim == 2 and numbers.shape[1] == 1:
            numbers = numbers[:, 0]
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise TcmError(
                f"{source}: labels have shape {numbers.shape} and dtype {numbers.dtype}; give one integer per image"
            )
        # Compared before the cast to int64, which would wrap round for large unsigned numbers.
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) > 1_000_000):
            raise TcmError(
                f"{source}: labels run from {numbers.min()} to {numbers.max()}; number the classes 0, 1, 2, ... "
                "(at most a million)"
            )
        classes = numbers.astype(np.int64)
        highest = int(classes.max(initial=-1))
        if names and highest >= len(names):
            raise TcmError(
                f"{source}: label {highest} has no name among the {len(names)} class names; add the missing ones"
            )
        return ClassLabels(classes, tuple(names) or numbered(highest + 1))


def numbered(count: int) -> tuple[str, ...]:
    """Return the names of classes that have none: their numbers."""
    return tuple(str(number) for number in range(count))


def named_classes(names: tuple[str, ...]) -> Classes:
    """Return the classes of these names; numbers do not count as names.

    >>> named_classes(("cat", "dog")).names, named_classes(("0", "1")).names
    (('cat', 'dog'), ())
    """
    return Classes(len(names), () if names == numbered(len(names)) else names)


@dataclass(frozen=True)
class Broken:
    """A file that could not be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Stored:
    """The files that a data set reads its images from, and which part of them, if the files alone do not say it."""

    files: Iterable[Path]
    part: str = ""


class Dataset(ABC):
    """Images of one shape, by index, as uint8, with what they are annotated with, if anything.

    >>> images, condition = open_dataset("digits").read(np.arange(16))  # doctest: +SKIP
    """

    in_memory: bool = False
    latents: Latents | None = None
    """What the images are encoded to, if they are latents (float16) instead of pixels."""

    def __init__(
        self,
        count: int,
        shape: tuple[int, int, int],
        annotations: Annotations | None,
        skipped: Sequence[Broken] = (),
    ):
        self.count = count
        self.shape = shape
        self.annotations = annotations
        self.skipped = tuple(skipped)

    @property
    def condition_kind(self) -> ConditionKind | None:
        """Return what a model of this data can be conditioned on."""
        return None if self.annotations is None else self.annotations.kind

    @property
    def class_labels(self) -> ClassLabels | None:
        """Return the images' classes, if they are annotated with them."""
        return None if self.annotations is None else self.annotations.classes

    @property
    def captions(self) -> Sequence[str] | None:
        """Return the images' captions, if they are annotated with them."""
        return None if self.annotations is None else self.annotations.texts

    @abstractmethod
    def pixels(self, indices: Indices) -> Pixels:
        """Return the images at valid `indices` as uint8 [n, C, H, W]."""

    def trajectory(self, indices: Indices) -> Trajectory | None:
        """Return stored points of the trajectories that end at these images, if there are any."""
        return None

    def read(self, indices: Indices) -> tuple[Pixels, Condition | None]:
        """Return the images (uint8 [n, C, H, W]) at `indices` and their condition, if they have one, in that order."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < self.count):
            raise TcmError(
                f"indices {indices.min()} to {indices.max()} are out of range for {self.count} images; use 0 to "
                f"{self.count - 1}"
            )
        return self.pixels(indices), None if self.annotations is None else self.annotations.condition(indices)

    def chunks(self, indices: Indices | None = None) -> Iterator[Pixels]:
        """Yield the images at `indices`, or all, in that order and some 16 MB at a time."""
        chosen = np.arange(self.count) if indices is None else indices
        size = max(1, CHUNK_BYTES // prod(self.shape))
        for start in range(0, len(chosen), size):
            yield self.pixels(chosen[start : start + size])

    def stored(self) -> Stored | None:
        """Return where the images are read from as they are needed; None if all of them are in memory."""
        return None

    def content_hash(self) -> str:
        """Return the SHA-256 of count, shape, decoded pixels, annotations and trajectories, however they are stored.

        This reads every image; `tcm.data.hashing` remembers the result.
        """
        digest = hashlib.sha256(np.array([self.count, *self.shape], dtype="<i8").tobytes())
        for images in self.chunks():
            digest.update(np.ascontiguousarray(images).data)
        if self.annotations is not None:
            digest.update(self.annotations.content())
        for start in range(0, self.count, 4096):
            trajectory = self.trajectory(np.arange(start, min(start + 4096, self.count)))
            if trajectory is None:
                break
            digest.update(trajectory.points.numpy().tobytes() + trajectory.t.numpy().tobytes())
        return digest.hexdigest()


class ArrayDataset(Dataset):
    """A data set held in memory (or in a memory-mapped file): uint8 [n, C, H, W].

    >>> ArrayDataset(np.zeros((2, 3, 8, 8), np.uint8)).shape
    (3, 8, 8)
    """

    in_memory = True

    def __init__(
        self,
        images: Pixels,
        annotations: Annotations | None = None,
        skipped: Sequence[Broken] = (),
        mapped: Path | None = None,
    ):
        if images.ndim != 4 or images.dtype != np.uint8 or images.shape[1] not in (1, 3) or 0 in images.shape:
            raise TcmError(
                f"images have shape {images.shape} and dtype {images.dtype}; give uint8 [n, 1 or 3, height, width]"
            )
        if annotations is not None and len(annotations) != len(images):
            what = "labels" if isinstance(annotations, ClassLabels) else f"annotations ({annotations.kind})"
            raise TcmError(f"{len(annotations)} {what} for {len(images)} images; give one per image")
        channels, height, width = images.shape[1:]
        super().__init__(len(images), (channels, height, width), annotations, skipped)
        self._images = images
        self._mapped = mapped

    def stored(self) -> Stored | None:
        """Return the file that the images are mapped from, if they are."""
        return None if self._mapped is None else Stored([self._mapped])

    def pixels(self, indices: Indices) -> Pixels:
        """Return the images at `indices`."""
        return self._images[indices]
