"""What is in a data set: counts, balance, mean and standard deviation (so sigma_data), duplicates."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tcm.data.dataset import Broken, Dataset, Indices, Pixels
from tcm.method.conditions import ConditionKind

SAMPLE = 2000
"""Images that are looked at where not all are needed."""


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
    counts = np.zeros((dataset.shape[0], 256), np.int64)
    for images in dataset.chunks():
        seen.update(hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest() for image in images)
        counts += _channel_counts(images)
    means, stds = zip(*map(_mean_and_std, counts), strict=True)
    _, sigma_data = _mean_and_std(counts.sum(0))
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


def sample_of(dataset: Dataset) -> Indices:
    """The indices of up to 2,000 images of a data set, always the same."""
    return np.sort(np.random.default_rng(0).permutation(dataset.count)[:SAMPLE])


def sampled_deviation(dataset: Dataset) -> float:
    """The standard deviation of the pixels in [-1, 1] of a sample of a data set."""
    counts = sum(_channel_counts(images).sum(0) for images in dataset.chunks(sample_of(dataset)))
    return _mean_and_std(np.asarray(counts))[1]


def _channel_counts(images: Pixels) -> NDArray[np.int64]:
    """How often each channel has each value [C, 256]."""
    channels = range(images.shape[1])
    return np.stack([np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in channels])


def _mean_and_std(counts: NDArray[np.int64]) -> tuple[float, float]:
    """Of pixels in [-1, 1], by how often each of the 256 values occurs; the sums are exact."""
    values = range(256)
    count = int(counts.sum())
    total = sum(value * int(times) for value, times in zip(values, counts, strict=True))
    squares = sum(value**2 * int(times) for value, times in zip(values, counts, strict=True))
    mean = total / count
    variance = (squares * count - total**2) / count**2
    return mean / 127.5 - 1, variance**0.5 / 127.5
