"""Is it memorising? The training images nearest to samples, by pixels and by a detector's features."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tcm.data import Dataset, to_float, to_uint8
from tcm.evaluation.features import Detector

MOST_IMAGES = 50_000
CHUNK_BYTES = 2**26
"""Training images that are compared at once, in float32."""


@dataclass(frozen=True)
class Neighbours:
    """The nearest training images [n, k, C, H, W] of n samples, and the distances [n, k] to them."""

    images: Tensor
    distances: Tensor


@dataclass(frozen=True)
class Closeness:
    """Median distance (RMS over pixels, of 255, or over latents) to the nearest training image: of samples, and of
    training images.

    `searched` of the data set's images were looked at.
    """

    samples: float
    training: float
    searched: int


def nearest(samples: Tensor, dataset: Dataset, k: int, detector: Detector | None = None) -> Neighbours:
    """The k nearest of the first 50,000 training images for uint8 samples [n, C, H, W], nearest first.

    Where the data are latents, the samples are encoded, distances are those of latents, and what is found is decoded.

    >>> from tcm.data import open_dataset
    >>> digits = open_dataset("digits")
    >>> nearest(torch.from_numpy(digits.pixels(np.arange(2))), digits, k=1).distances.tolist()
    [[0.0], [0.0]]
    """
    distances, indices = _search(_encoded(samples, dataset), dataset, k, detector)
    found = torch.from_numpy(dataset.pixels(indices.flatten().numpy()))
    images = found if dataset.latents is None else to_uint8(dataset.latents.decode(found))
    return Neighbours(images.view(*indices.shape, *images.shape[1:]), distances)


def closeness(samples: Tensor, dataset: Dataset) -> Closeness:
    """How near samples come to training images, compared with how near training images come to each other."""
    count = min(len(samples), dataset.count)
    some = np.random.default_rng(0).permutation(searched(dataset))[:count]
    among_training, _ = _search(torch.from_numpy(dataset.pixels(some)), dataset, k=2)
    of_samples, _ = _search(_encoded(samples, dataset), dataset, k=1)
    return Closeness(float(of_samples[:, 0].median()), float(among_training[:, -1].median()), searched(dataset))


def _search(images: Tensor, dataset: Dataset, k: int, detector: Detector | None = None) -> tuple[Tensor, Tensor]:
    """The distances [n, k] of images, or latents, to the nearest ones of the data, and their indices."""
    wanted = _points(images, detector)
    distances = torch.empty(len(images), 0)
    indices = torch.empty(len(images), 0, dtype=torch.int64)
    rows = max(1, CHUNK_BYTES // (4 * images[0].numel()))
    for start in range(0, searched(dataset), rows):
        chunk = np.arange(start, min(start + rows, searched(dataset)))
        found = torch.cdist(
            wanted,
            _points(torch.from_numpy(dataset.pixels(chunk)), detector),
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        distances = torch.cat([distances, found], 1)
        indices = torch.cat([indices, torch.from_numpy(chunk).expand(len(images), -1)], 1)
        order = distances.argsort(stable=True, dim=1)[:, :k]
        distances, indices = distances.gather(1, order), indices.gather(1, order)
    return distances / (1.0 if detector else images[0].numel() ** 0.5), indices


def _encoded(samples: Tensor, dataset: Dataset) -> Tensor:
    """The samples in the form of the data: uint8 pixels, or latents."""
    return samples if dataset.latents is None else dataset.latents.encode(to_float(samples))


def searched(dataset: Dataset) -> int:
    """How many of the data set's images are looked at."""
    return min(dataset.count, MOST_IMAGES)


def _points(images: Tensor, detector: Detector | None) -> Tensor:
    return images.flatten(1).float() if detector is None else detector.features(images)
