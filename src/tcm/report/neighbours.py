"""Is it memorising? The training images nearest to samples, by pixels and by a detector's features."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tcm.data import Dataset
from tcm.evaluation.features import Detector

MOST_IMAGES = 50_000
CHUNK = 4096


@dataclass(frozen=True)
class Neighbours:
    """The nearest training images [n, k, C, H, W] of n samples, and the distances [n, k] to them."""

    images: Tensor
    distances: Tensor


@dataclass(frozen=True)
class Closeness:
    """Median distance (RMS over pixels, of 255) to the nearest training image: of samples, and of training images.

    `searched` of the data set's images were looked at.
    """

    samples: float
    training: float
    searched: int


def nearest(samples: Tensor, dataset: Dataset, k: int, detector: Detector | None = None) -> Neighbours:
    """The k nearest of the first 50,000 training images for uint8 samples [n, C, H, W], nearest first.

    >>> from tcm.data import open_dataset
    >>> digits = open_dataset("digits")
    >>> nearest(torch.from_numpy(digits.pixels(np.arange(2))), digits, k=1).distances.tolist()
    [[0.0], [0.0]]
    """
    wanted = _points(samples, detector)
    distances = torch.empty(len(samples), 0)
    indices = torch.empty(len(samples), 0, dtype=torch.int64)
    for start in range(0, searched(dataset), CHUNK):
        chunk = np.arange(start, min(start + CHUNK, searched(dataset)))
        found = torch.cdist(
            wanted,
            _points(torch.from_numpy(dataset.pixels(chunk)), detector),
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        distances = torch.cat([distances, found], 1)
        indices = torch.cat([indices, torch.from_numpy(chunk).expand(len(samples), -1)], 1)
        order = distances.argsort(stable=True, dim=1)[:, :k]
        distances, indices = distances.gather(1, order), indices.gather(1, order)
    scale = 1.0 if detector else samples[0].numel() ** 0.5
    images = torch.from_numpy(dataset.pixels(indices.flatten().numpy())).view(*indices.shape, *dataset.shape)
    return Neighbours(images, distances / scale)


def closeness(samples: Tensor, dataset: Dataset) -> Closeness:
    """How near samples come to training images, compared with how near training images come to each other."""
    count = min(len(samples), dataset.count)
    some = np.random.default_rng(0).permutation(searched(dataset))[:count]
    among_training = nearest(torch.from_numpy(dataset.pixels(some)), dataset, k=2).distances[:, -1]
    of_samples = nearest(samples, dataset, k=1).distances[:, 0]
    return Closeness(float(of_samples.median()), float(among_training.median()), searched(dataset))


def searched(dataset: Dataset) -> int:
    """How many of the data set's images are looked at."""
    return min(dataset.count, MOST_IMAGES)


def _points(images: Tensor, detector: Detector | None) -> Tensor:
    return images.flatten(1).float() if detector is None else detector.features(images)
