"""Batches of a data set, by step: the same images whatever the number of processes and workers, and after a restart."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from tcm.data.dataset import Dataset, Indices, Pixels
from tcm.data.order import check_seed, flips, global_batch, rank_indices
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition
from tcm.method.objectives import Trajectory

Resume = dict[str, Any]
"""A position in a stream, JSON-able."""


@dataclass(frozen=True)
class LoadedBatch:
    """One process's share of a step's batch."""

    images: Tensor
    """uint8 [b, C, H, W], or latents in float16, on the CPU; `tcm.data.pixels.to_float` belongs on the device."""
    condition: Condition | None
    """Of each image; on the CPU."""
    index: Tensor
    """int64 [b]: the index of each of these images in the whole batch: what randomness may depend on."""
    step: int
    trajectory: Trajectory | None = None
    """What the data set has of the trajectories that end at the images; on the CPU."""
    resume: Resume | None = None
    """For streams: this process's part of the position after this batch. The parts of all processes, united, are what
    `starting_at` resumes from."""


class BatchSource(Protocol):
    """What training reads from: a data set by index (`Batches`) or a stream (`StreamBatches`)."""

    def starting_at(self, step: int, resume: Resume | None = None) -> Iterator[LoadedBatch]:
        """Yield the batches of `step`, step + 1, ... without end; `resume` is the position that a stream had there."""


class Batches:
    """A data set's batches, each a pure function of (seed, step); process `rank` of `world` gets its share of each.

    >>> batches = Batches(open_dataset("digits"), seed=0, batch=128)  # doctest: +SKIP
    >>> for loaded in batches.starting_at(10_000_000): ...  # doctest: +SKIP

    `workers` are processes that read and decode ahead; data sets in memory need none and start none.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        batch: int,
        flip: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
    ):
        check_seed(seed)
        if workers < 0 or batch < 1:
            raise TcmError(f"workers={workers} must be at least 0, batch={batch} at least 1")
        self._steps = _Steps(dataset, seed, batch, flip, rank_indices(batch, rank, world))
        self._workers = 0 if dataset.in_memory else workers

    def at(self, step: int) -> LoadedBatch:
        """Return the batch of one step."""
        return _result(self._steps[step])

    def starting_at(self, step: int, resume: Resume | None = None) -> Iterator[LoadedBatch]:
        """Yield the batches of `step`, step + 1, ... without end; nothing before it is read. `resume` has no use."""
        if self._workers == 0:
            yield from (self.at(number) for number in count(step))
        else:
            with closing(read_ahead(self._steps, count(step), self._workers)) as ahead:
                yield from (_result(loaded) for loaded in ahead)


def read_ahead(items: TorchDataset[Any], indices: Iterable[int], workers: int) -> Generator[Any, None, None]:
    """Yield items[i] for the indices, in their order, from `workers` processes (0: from this one)."""
    # Its own generator: a DataLoader would otherwise draw from the global one and shift everything random after it.
    yield from DataLoader(
        items, batch_size=None, sampler=indices, num_workers=workers, generator=torch.Generator().manual_seed(0)
    )


def as_batch(
    images: Pixels,
    condition: Condition | None,
    mirrored: np.ndarray[Any, np.dtype[np.bool_]] | None,
    index: Indices,
    step: int,
    trajectory: Trajectory | None = None,
) -> LoadedBatch:
    """Mirror the chosen images, with the trajectories that lead to them, and wrap the arrays as tensors."""
    if mirrored is not None:
        images = np.where(mirrored[:, None, None, None], images[..., ::-1], images)
        if trajectory is not None:
            turned = torch.from_numpy(mirrored)[:, None, None, None, None]
            trajectory = replace(trajectory, points=torch.where(turned, trajectory.points.flip(-1), trajectory.points))
    pixels = torch.from_numpy(np.ascontiguousarray(images))
    return LoadedBatch(pixels, condition, torch.from_numpy(index), step, trajectory)


class _Steps(TorchDataset[LoadedBatch | TcmError]):
    """Maps a step to its batch; an error is a value here: raised in a worker, it would come back as a traceback."""

    def __init__(self, dataset: Dataset, seed: int, batch: int, flip: bool, index: Indices):
        self._dataset = dataset
        self._seed = seed
        self._batch = batch
        self._flip = flip
        self._index = index

    def __getitem__(self, step: int) -> LoadedBatch | TcmError:
        try:
            indices = global_batch(self._dataset.count, self._seed, step, self._batch)[self._index]
            images, condition = self._dataset.read(indices)
            trajectory = self._dataset.trajectory(indices)
            if trajectory is not None:
                trajectory.check(images.shape)
        except TcmError as error:
            return error
        mirrored = flips(self._seed, step, self._index) if self._flip else None
        return as_batch(images, condition, mirrored, self._index, step, trajectory)


def _result(loaded: LoadedBatch | TcmError) -> LoadedBatch:
    if isinstance(loaded, TcmError):
        raise loaded
    return loaded
