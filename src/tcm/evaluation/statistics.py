"""Mean and covariance of features, and the distance between two such Gaussians."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError

CHUNK = 1024


@dataclass(frozen=True)
class Statistics:
    """The Gaussian N(mean, covariance) fitted to `count` feature vectors; float64, covariance with N - 1 (as EDM does).

    `count` is None for published statistics, whose files do not say it.

    >>> features = torch.randn(100, 8)
    >>> whole = Statistics.of(features)
    >>> parts = Statistics.of(features[:30]).merge(Statistics.of(features[30:]))
    >>> torch.allclose(whole.covariance, parts.covariance)
    True
    """

    mean: Tensor
    covariance: Tensor
    count: int | None

    @classmethod
    def of(cls, features: Tensor) -> Statistics:
        """Fit to features [n, d]: mean = Σ x / n, covariance = Σ (x - mean)(x - mean)ᵀ / (n - 1)."""
        if features.ndim != 2 or len(features) == 0:
            raise TcmError(
                f"features have the shape {tuple(features.shape)}; statistics need at least one row of [n, d]"
            )
        if not bool(torch.isfinite(features).all()):
            raise TcmError("features hold NaN or infinity; look at the images that they come from")
        features = features.double()
        mean = features.mean(0)
        centred = features - mean
        return cls(mean, centred.T @ centred / max(len(features) - 1, 1), len(features))

    @property
    def dimension(self) -> int:
        """Length of a feature vector."""
        return len(self.mean)

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both samples together, without seeing them again (Chan's parallel update)."""
        if self.count is None or other.count is None:
            raise TcmError("statistics without a count cannot be merged; compute them from images")
        count = self.count + other.count
        shift = other.mean - self.mean
        scatter = self.covariance * (self.count - 1) + other.covariance * (other.count - 1)
        scatter += torch.outer(shift, shift) * (self.count * other.count / count)
        return Statistics(self.mean + shift * (other.count / count), scatter / (count - 1), count)


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


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """d² = |μ_a - μ_b|² + tr(Σ_a + Σ_b - 2 (Σ_a Σ_b)^½), by symmetric eigen-decompositions.

    With Σ = L Lᵀ, tr (Σ_a Σ_b)^½ is the nuclear norm of L_aᵀ L_b: no square root of a rounding error, also where a
    covariance is singular because the images are fewer than the features.

    >>> x = torch.randn(500, 4)
    >>> round(frechet_distance(Statistics.of(x), Statistics.of(x + 1.0)), 3)
    4.0
    """
    if a.dimension != b.dimension:
        raise TcmError(
            f"features of {a.dimension} and {b.dimension} dimensions cannot be compared; use the same detector"
        )
    cross = torch.linalg.svdvals(_factor(a.covariance).T @ _factor(b.covariance)).sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * cross
    return max(float(distance), 0.0)


def _factor(covariance: Tensor) -> Tensor:
    """L [d, rank] with Σ = L Lᵀ; eigenvalues that are rounding errors are left out."""
    values, vectors = torch.linalg.eigh(covariance)
    floor = values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    kept = values > floor
    factor: Tensor = vectors[:, kept] * values[kept].sqrt()
    return factor


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
