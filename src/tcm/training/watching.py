"""How a stage's model learns to denoise: a distance that is cheap enough to measure while it trains.

dFID_t compares data and denoised data by the features of a large network. Here the features are the first few principal
components of the pixels: this shows when dFID_t flattens, at a small part of its cost, but its values are not dFID's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tcm.data.loader import BatchSource
from tcm.foundation.devices import fp32_products
from tcm.foundation.randomness import SampleStreams, derive_seed
from tcm.method.conditions import Condition
from tcm.method.gaussians import Statistics, frechet_distance
from tcm.recipes.stages.flattening import Curves
from tcm.training.trainer import Trainer

COMPONENTS = 8
IMAGES_PER_COMPONENT = 8
"""Fewer images than this for each component do not determine a covariance."""
METRIC = "denoised_distance"
"""The key of the measured distances, by time, in a line of metrics.jsonl."""


def watched_steps(steps: int) -> Iterator[int]:
    """The steps after which we measure: from an eighth of `steps` on, each about a sixth later than the one before.

    Which they are depends on `steps` only for the first of them, so that a stage that is extended measures at the same
    steps as a longer one.

    >>> list(watched_steps(450))
    [58, 67, 78, 91, 106, 123, 143, 166, 193, 225, 262, 305, 355, 414]
    """
    step = 1
    while step <= steps:
        if step >= steps / 8:
            yield step
        step += max(1, step // 6)


def principal_components(data: Tensor) -> Tensor:
    """The directions [d, k] in which data [n, d] vary most: 8, or fewer if there are few data.

    >>> principal_components(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(8, 1)).abs()
    tensor([[1., 0.],
            [0., 1.]])
    """
    count = max(1, min(COMPONENTS, len(data) // IMAGES_PER_COMPONENT))
    return torch.linalg.svd(data - data.mean(0), full_matrices=False).Vh[:count].T


@dataclass(frozen=True)
class _Part:
    """Images on the device, with their condition and noise."""

    x: Tensor
    condition: Condition | None
    eps: Tensor


class DenoisingWatch:
    """The Fréchet distance between images of the data x and f(x + t ε, t), in the data's principal components.

    The images are the first of the stage's batches; they and their noise ε stay the same. Each process denoises its
    share, and all of them find the same distances.
    """

    def __init__(self, trainer: Trainer, batches: BatchSource, times: Sequence[float]) -> None:
        self.times, self._trainer = times, trainer
        self._parts = list(_parts(trainer, batches))
        own = torch.cat([part.x.flatten(1).cpu() for part in self._parts])
        data = torch.cat(trainer.processes.gather(own)).double()
        self._components = principal_components(data)
        self._data = Statistics.of(data @ self._components)

    def distances(self) -> dict[float, float]:
        """The distance at each time, with the averaged weights; a time at which the model overflows is left out."""
        eager = torch.compiler.set_stance("force_eager")
        with self._trainer.averaged(), torch.no_grad(), fp32_products("ieee"), eager:
            features = {t: self._features(t) for t in self.times}
        gathered = self._trainer.processes.gather(features)
        found = {}
        for t in self.times:
            together = torch.cat([part[t] for part in gathered])
            if together.isfinite().all():
                found[t] = frechet_distance(self._data, Statistics.of(together))
        return self._trainer.processes.gather(found)[0]

    def _features(self, t: float) -> Tensor:
        f = self._trainer.student
        parts = [f(part.x + t * part.eps, torch.full((len(part.x),), t), part.condition) for part in self._parts]
        return torch.cat([part.flatten(1).cpu() for part in parts]).double() @ self._components


def _parts(trainer: Trainer, batches: BatchSource) -> Iterator[_Part]:
    """This process's share of the images, in micro-batches as in training."""
    stage, processes = trainer.stage, trainer.processes
    count = -(-stage.watched_images // stage.batch)
    rows = slice(-(-stage.watched_images // (count * stage.accumulation * processes.count)))
    for loaded in islice(batches.starting_at(0), count):
        for batch, _ in trainer.micro_batches(loaded, stage.accumulation):
            condition = None if batch.condition is None else batch.condition.select(rows)
            seeds = [derive_seed(*trainer.seed, "watched", loaded.step, int(index)) for index in batch.index[rows]]
            x = batch.x[rows]
            yield _Part(x, condition, SampleStreams(seeds, processes.device).normal(x.shape[1:]))


def extended(curves: Curves, step: int, distances: dict[float, float]) -> dict[float, list[tuple[int, float]]]:
    """The curves with the distances of one more step."""
    longer = {t: [*curves.get(t, ()), (step, distance)] for t, distance in distances.items()}
    return {t: list(curve) for t, curve in curves.items()} | longer


def read_curves(lines: Sequence[dict[str, Any]]) -> dict[float, list[tuple[int, float]]]:
    """The curves in the lines of a metrics.jsonl."""
    curves: dict[float, list[tuple[int, float]]] = {}
    for line in lines:
        for t, distance in line.get(METRIC, {}).items():
            curves.setdefault(float(t), []).append((line["step"], distance))
    return curves
