"""Statistics of features that come in batches, and the distance that infinitely many images would have."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.method.gaussians import Statistics, frechet_distance

CHUNK = 1024


def chunked(batches: Iterable[Tensor], size: int = CHUNK) -> Iterator[Tensor]:
    """Regroup batches into chunks of `size` rows (but for the last), so that sums do not depend on the batch size."""
    waiting: list[Tensor] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch)
        while rows >= size:
            together = torch.cat(waiting)
            yield together[:size]
            waiting = [together[size:]]
            rows -= size
    if rows:
        yield torch.cat(waiting)


def accumulate(batches: Iterable[Tensor]) -> Statistics | None:
    """Statistics of a stream of feature batches in one pass, the same whatever the batch size; None for no batches."""
    newest = deque(running_statistics(batches), maxlen=1)
    return newest[0] if newest else None


def running_statistics(batches: Iterable[Tensor], total: Statistics | None = None) -> Iterator[Statistics]:
    """The statistics of all features so far, after each chunk of them; `total` are those of features seen before."""
    for chunk in chunked(batches):
        part = Statistics.of(chunk)
        total = part if total is None else total.merge(part)
        yield total


def extrapolated_distance(features: Tensor, reference: Statistics, points: int = 8, seed: int = 0) -> float:
    """The distance at N → ∞ (FID∞, Chong & Forsyth 2020): the intercept of a line fitted to the distance over 1/N.

    The distance from N images is too large by about c/N; it is measured on `points` random subsets whose sizes run from
    a quarter of the images to all of them.
    """
    count = len(features)
    sizes = [round(count * (0.25 + 0.75 * i / (points - 1))) for i in range(points)]
    if sizes[0] < 2:
        raise TcmError(f"{count} images are too few to extrapolate from; give at least 8")
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for size in sizes:
        subset = features[torch.randperm(count, generator=generator)[:size]]
        rows.append((1.0 / size, frechet_distance(Statistics.of(subset), reference)))
    inverse = [x for x, _ in rows]
    distances = [y for _, y in rows]
    x_mean, y_mean = math.fsum(inverse) / points, math.fsum(distances) / points
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in rows) / math.fsum((x - x_mean) ** 2 for x in inverse)
    return y_mean - slope * x_mean
