"""Mean and covariance of features, and the distance between two such Gaussians."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError


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
