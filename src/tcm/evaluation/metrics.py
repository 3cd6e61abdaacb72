"""Metrics that need the features themselves: kernel distance, precision and recall, Inception score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tcm.errors import TcmError

ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class Spread:
    """A mean over repetitions and their standard deviation."""

    mean: float
    deviation: float


def kernel_distance(features: Tensor, reference: Tensor, subsets: int = 100, size: int = 1000, seed: int = 0) -> Spread:
    """KID (Bińkowski et al. 2018): the unbiased MMD² with the kernel (xᵀy/d + 1)³, averaged over random subsets.

    >>> abs(kernel_distance(torch.randn(200, 8), torch.randn(200, 8), subsets=10, size=100).mean) < 1
    True
    """
    if features.shape[1] != reference.shape[1]:
        raise TcmError(f"features of {features.shape[1]} and {reference.shape[1]} dimensions; use the same detector")
    size = min(size, len(features), len(reference))
    if size < 2:
        raise TcmError(
            f"{len(features)} and {len(reference)} images are too few for a kernel distance; give at least 2"
        )
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        x = features[torch.randperm(len(features), generator=generator)[:size]].double()
        y = reference[torch.randperm(len(reference), generator=generator)[:size]].double()
        values.append(_mean_off_diagonal(x) + _mean_off_diagonal(y) - 2 * _kernel(x, y).mean())
    together = torch.stack(values)
    return Spread(float(together.mean()), float(together.std(correction=0)))


def _mean_off_diagonal(x: Tensor) -> Tensor:
    values = _kernel(x, x)
    return (values.sum() - values.diagonal().sum()) / (len(x) * (len(x) - 1))


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


@dataclass(frozen=True)
class Coverage:
    """Precision: the share of samples inside the data's manifold. Recall: the share of data inside the samples'."""

    precision: float
    recall: float


def precision_recall(features: Tensor, reference: Tensor, neighbours: int = 3) -> Coverage:
    """Improved precision and recall (Kynkäänniemi et al. 2019).

    A manifold is the union of balls around its points, each reaching to the `neighbours`-th nearest other point.
    """
    if min(len(features), len(reference)) <= neighbours:
        raise TcmError(
            f"{len(features)} and {len(reference)} images are too few for precision and recall with {neighbours} "
            f"neighbours; give at least {neighbours + 1}"
        )
    return Coverage(_share_inside(features, reference, neighbours), _share_inside(reference, features, neighbours))


def _share_inside(points: Tensor, manifold: Tensor, neighbours: int) -> float:
    radii = torch.cat([_radii(rows, manifold, neighbours) for rows in torch.split(manifold, ROWS_AT_ONCE)])
    inside = [(torch.cdist(rows, manifold) <= radii).any(1) for rows in torch.split(points, ROWS_AT_ONCE)]
    return float(torch.cat(inside).double().mean())


def _radii(rows: Tensor, manifold: Tensor, neighbours: int) -> Tensor:
    """Distance of each row to its k-th nearest other point; the smallest distance is to itself."""
    return torch.cdist(rows, manifold).kthvalue(neighbours + 1, dim=1).values


def inception_score(probabilities: Tensor, splits: int = 10) -> Spread:
    """exp(E_x KL(p(y|x) ‖ p(y))) (Salimans et al. 2016): mean and deviation over `splits` equal parts, in order."""
    if len(probabilities) < splits:
        raise TcmError(f"{len(probabilities)} images cannot be split into {splits} parts; give more images")
    values = []
    for part in torch.tensor_split(probabilities.double(), splits):
        marginal = part.mean(0)
        divergence = torch.special.xlogy(part, part) - torch.special.xlogy(part, marginal)
        values.append(divergence.sum(1).mean().exp())
    together = torch.stack(values)
    return Spread(float(together.mean()), float(together.std(correction=0)))
