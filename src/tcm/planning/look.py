"""What a plan needs to know about a data set: its summary, how far apart images are, and whether to mirror them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tcm.data.dataset import Dataset, Pixels
from tcm.data.summary import Summary, summarize

SAMPLE = 2000
"""Images that distances and the mirror test are taken from."""
GRID = 16
"""The mirror test sees images at this many pixels across at most."""
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


@dataclass(frozen=True)
class Look:
    """A data set as a plan sees it."""

    summary: Summary
    farthest: float
    """The largest distance between two images in [−1, 1], of a sample."""
    mirror: MirrorTest


def look_at(dataset: Dataset) -> Look:
    """Read a data set once, and a sample of it again."""
    indices = np.random.default_rng(0).permutation(dataset.count)[:SAMPLE]
    pixels, labels = dataset.pixels(indices), dataset.class_labels
    groups = {} if labels is None else {name: labels.values[indices] == k for k, name in enumerate(labels.names)}
    return Look(summarize(dataset), farthest(pixels), mirror_test(pixels, groups))


def farthest(pixels: Pixels) -> float:
    """max ‖x − y‖ over pairs of images in [−1, 1].

    >>> round(farthest(np.array([[[[0]]], [[[255]]]], np.uint8)), 3)
    2.0
    """
    x = pixels.reshape(len(pixels), -1) / 127.5
    squares = (x**2).sum(1)
    return float(np.sqrt(max(0.0, (squares[:, None] + squares - 2 * x @ x.T).max())))


def mirror_test(pixels: Pixels, classes: Mapping[str, NDArray[np.bool_]]) -> MirrorTest:
    """Try to tell images from their mirror images: all of them, and the images of each class that has enough of them.

    Where that works, there is text, a flag, or a shoe that always points left, and mirroring would teach a model images
    that are not in the data.
    """
    groups = {"all images": np.ones(len(pixels), bool)}
    groups |= {name: rows for name, rows in classes.items() if rows.sum() >= SMALLEST_CLASS}
    tests = [_told_apart(_antisymmetric(pixels[rows]), group) for group, rows in groups.items()]
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
