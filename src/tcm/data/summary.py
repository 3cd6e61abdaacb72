"""What is in a data set: counts, balance, mean and standard deviation (so sigma_data), duplicates."""

import hashlib
from dataclasses import dataclass

import numpy as np

from tcm.data.dataset import Broken, Dataset
from tcm.method.conditions import ConditionKind


@dataclass(frozen=True)
class Summary:
    """Figures of a data set; pixels are taken in [-1, 1], as networks see them."""

    count: int
    shape: tuple[int, int, int]
    condition: ConditionKind | None
    """What the images are annotated with."""
    class_counts: tuple[tuple[str, int], ...]
    captions: int
    """Images with a caption."""
    mean: tuple[float, ...]
    """Per channel."""
    std: tuple[float, ...]
    """Per channel."""
    sigma_data: float
    """The standard deviation of all pixels together."""
    duplicates: int
    """Images that repeat an earlier one, pixel for pixel."""
    skipped: tuple[Broken, ...]


def summarize(dataset: Dataset) -> Summary:
    """Read a data set once and sum it up, exactly: sums of uint8 values and of their squares are integers.

    >>> round(summarize(open_dataset("digits")).sigma_data, 2)  # doctest: +SKIP
    0.75
    """
    seen: set[bytes] = set()
    total = np.zeros(dataset.shape[0], np.int64)
    squares = np.zeros(dataset.shape[0], np.int64)
    for images in dataset.chunks():
        seen.update(hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest() for image in images)
        values = images.astype(np.int64)
        total += values.sum(axis=(0, 2, 3))
        squares += (values**2).sum(axis=(0, 2, 3))
    pixels = dataset.count * dataset.shape[1] * dataset.shape[2]
    means, stds = zip(
        *(_mean_and_std(*sums, pixels) for sums in zip(total.tolist(), squares.tolist(), strict=True)), strict=True
    )
    _, sigma_data = _mean_and_std(int(total.sum()), int(squares.sum()), pixels * dataset.shape[0])
    labels = dataset.class_labels
    names = () if labels is None else labels.names
    numbers = [] if labels is None else np.bincount(labels.values, minlength=len(names)).tolist()
    return Summary(
        count=dataset.count,
        shape=dataset.shape,
        condition=dataset.condition_kind,
        captions=sum(1 for text in dataset.captions or () if text),
        class_counts=tuple(zip(names, numbers, strict=True)),
        mean=means,
        std=stds,
        sigma_data=sigma_data,
        duplicates=dataset.count - len(seen),
        skipped=dataset.skipped,
    )


def _mean_and_std(total: int, squares: int, count: int) -> tuple[float, float]:
    mean = total / count
    variance = (squares * count - total**2) / count**2
    return mean / 127.5 - 1, variance**0.5 / 127.5
