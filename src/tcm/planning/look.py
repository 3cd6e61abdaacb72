"""What a plan needs to know about a data set: its summary, how far apart images are, and whether to mirror them."""

from dataclasses import dataclass

import numpy as np

from tcm.data.dataset import Dataset, Pixels
from tcm.data.mirroring import MirrorTest, mirrors
from tcm.data.summary import Summary, sample_of, summarize


@dataclass(frozen=True)
class Look:
    """A data set as a plan sees it."""

    summary: Summary
    farthest: float
    """The largest distance between two images in [−1, 1], of a sample."""
    mirror: MirrorTest


def look_at(dataset: Dataset) -> Look:
    """Read a data set once, and a sample of it again."""
    return Look(summarize(dataset), farthest(dataset.pixels(sample_of(dataset))), mirrors(dataset))


def farthest(pixels: Pixels) -> float:
    """max ‖x − y‖ over pairs of images in [−1, 1].

    >>> round(farthest(np.array([[[[0]]], [[[255]]]], np.uint8)), 3)
    2.0
    """
    x = pixels.reshape(len(pixels), -1) / 127.5
    squares = (x**2).sum(1)
    return float(np.sqrt(max(0.0, (squares[:, None] + squares - 2 * x @ x.T).max())))
