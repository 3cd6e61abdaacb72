"""What a plan needs to know about a data set: its summary, how far apart images are, and whether to mirror them."""

import warnings
from dataclasses import dataclass

import numpy as np

from tcm.data.dataset import Dataset, Pixels
from tcm.data.mirroring import MirrorTest, mirrors
from tcm.data.summary import Summary, sample_of, summarize
from tcm.foundation.errors import TcmError, TcmWarning

ENOUGH = 1000
"""Different images below which a model mostly learns them by heart."""
SMALLEST_SIDE = 4
"""Pixels; a U-Net has nothing to see in less."""


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


def check_enough(look: Look, path: str) -> None:
    """Refuse data that no model can learn anything from, and warn of too few images."""
    summary, different = look.summary, look.summary.count - look.summary.duplicates
    height, width = summary.shape[1:]
    if min(height, width) < SMALLEST_SIDE:
        raise TcmError(
            f"{path} has images of {height}×{width} pixels, too small to learn from; give images of at least "
            f"{SMALLEST_SIDE}×{SMALLEST_SIDE}"
        )
    if different == 1:
        found = "only one image" if summary.count == 1 else f"the same image {summary.count:,} times"
        raise TcmError(f"{path} has {found}, so there is nothing to learn; give {ENOUGH:,} different images or more")
    if different < ENOUGH:
        found = f"{different:,}" + (f" different ones among {summary.count:,}" if summary.duplicates else "")
        text = f"{path} has few images, {found}: a model will mostly repeat them; {ENOUGH:,} or more are enough"
        warnings.warn(text, TcmWarning, stacklevel=2)


def farthest(pixels: Pixels) -> float:
    """max ‖x − y‖ over pairs of images in [−1, 1].

    >>> round(farthest(np.array([[[[0]]], [[[255]]]], np.uint8)), 3)
    2.0
    """
    x = pixels.reshape(len(pixels), -1) / 127.5
    squares = (x**2).sum(1)
    return float(np.sqrt(max(0.0, (squares[:, None] + squares - 2 * x @ x.T).max())))
