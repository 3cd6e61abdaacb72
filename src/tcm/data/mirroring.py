"""Whether images may be mirrored: not if a linear classifier tells them from their mirror images."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tcm.data.dataset import Dataset, Pixels
from tcm.data.summary import sample_of

GRID = 16
"""Images are scaled down to this many pixels across, or somewhat more."""
TOLD_APART = 0.6
"""From this share of correct answers on, mirrored images are another kind of image."""
SMALLEST_CLASS = 40
"""Images that a class needs for a verdict of its own."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MirrorTest:
    """How often a linear classifier tells an image from its mirror image; 0.5 is guessing."""

    accuracy: float
    error: float
    """The standard error of the accuracy."""
    group: str
    """The class that it was worst for, or "all images"."""

    @property
    def safe(self) -> bool:
        return self.accuracy - 2 * self.error < TOLD_APART


def mirrors(dataset: Dataset) -> MirrorTest:
    """The mirror test of a sample of a data set and of its classes."""
    indices, labels = sample_of(dataset), dataset.class_labels
    groups = {} if labels is None else {name: labels.values[indices] == k for k, name in enumerate(labels.names)}
    return _worst(np.concatenate([_antisymmetric(images) for images in dataset.chunks(indices)]), groups)


def mirror_test(pixels: Pixels, classes: Mapping[str, NDArray[np.bool_]]) -> MirrorTest:
    """Try to tell images from their mirror images: all of them, and the images of each class that has enough of them.

    Where that works, there is text, a flag, or a shoe that always points left, and mirroring would teach a model images
    that are not in the data.
    """
    return _worst(_antisymmetric(pixels), classes)


def _worst(a: Floats, classes: Mapping[str, NDArray[np.bool_]]) -> MirrorTest:
    groups = {"all images": np.ones(len(a), bool)}
    groups |= {name: rows for name, rows in classes.items() if rows.sum() >= SMALLEST_CLASS}
    tests = [_told_apart(a[rows], group) for group, rows in groups.items()]
    return max(tests, key=lambda test: test.accuracy - 2 * test.error)


def _antisymmetric(pixels: Pixels) -> Floats:
    """(x − mirrored x)/2 at a low resolution, one row an image: what alone can tell the two apart."""
    height, width = pixels.shape[2:]
    down, across = max(1, height // GRID), max(1, width // GRID)
    x = pixels[:, :, : height // down * down, : width // across * across] / 127.5 - 1
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // down, down, w // across, across).mean((3, 5))
    half = (x - x[..., ::-1]) / 2
    return np.ascontiguousarray(half[..., : x.shape[-1] // 2]).reshape(n, -1)


def _told_apart(a: Floats, group: str) -> MirrorTest:
    """The cross-validated accuracy of sign(wᵀa), with w by ridge regression of 1 on a (and so of −1 on −a)."""
    folds = np.arange(len(a)) % 5
    right = np.full(len(a), 0.5)
    for fold in range(5) if len(a) >= 5 and a.shape[1] else ():
        train, test = a[folds != fold], a[folds == fold]
        gram = train.T @ train
        ridge = 0.1 * np.trace(gram) / len(gram) + 1e-12
        w = np.linalg.solve(gram + ridge * np.eye(len(gram)), train.sum(0))
        right[folds == fold] = (np.sign(test @ w) + 1) / 2
    return MirrorTest(float(right.mean()), 0.5 / len(a) ** 0.5, group)
