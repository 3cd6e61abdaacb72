"""Metrics that need the features themselves: kernel distance, precision and recall, Inception score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError

BLOCK = 2048
"""Side of a block: this many by this many distances are in memory at a time."""


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


def precision_recall(features: Tensor, reference: Tensor, neighbours: int = 3, block: int = BLOCK) -> Coverage:
    """Improved precision and recall (Kynkäänniemi et al. 2019), computed where the features are.

    A manifold is the union of balls around its points, each reaching to the `neighbours`-th nearest other point. Only
    block × block distances exist at a time.
    """
    if min(len(features), len(reference)) <= neighbours:
        raise TcmError(
            f"{len(features)} and {len(reference)} images are too few for precision and recall with {neighbours} "
            f"neighbours; give at least {neighbours + 1}"
        )
    reaches, reference_reaches = (_reaches(points, neighbours, block) for points in (features, reference))
    precise, recalled = (points.new_zeros(len(points), dtype=torch.bool) for points in (features, reference))
    for rows in _blocks(features, block):
        for columns in _blocks(reference, block):
            distances = torch.cdist(features[rows], reference[columns])
            precise[rows] |= (distances <= reference_reaches[columns]).any(1)
            recalled[columns] |= (distances <= reaches[rows, None]).any(0)
    return Coverage(float(precise.double().mean()), float(recalled.double().mean()))


def _reaches(points: Tensor, neighbours: int, block: int) -> Tensor:
    """The distance of each point to its k-th nearest other point; the smallest distance is to itself."""
    reaches = []
    for rows in _blocks(points, block):
        nearest = points.new_empty(len(points[rows]), 0)
        for columns in _blocks(points, block):
            candidates = torch.cat([nearest, torch.cdist(points[rows], points[columns])], 1)
            nearest = candidates.topk(min(neighbours + 1, candidates.shape[1]), largest=False).values
        reaches.append(nearest.amax(1))
    return torch.cat(reaches)


def _blocks(points: Tensor, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, len(points), size)]


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
