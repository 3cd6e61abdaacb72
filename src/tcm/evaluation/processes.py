"""Work shared by the processes that torchrun starts; alone, everything is a no-op."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tcm.evaluation.statistics import Statistics

Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """This process and its companions: process r of n takes the items r, r + n, r + 2n, …

    >>> Processes(rank=1, count=2).share([10, 11, 12, 13, 14])
    [11, 13]
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """The items that this process works on."""
        return list(items[self.rank :: self.count])

    def merge(self, own: Statistics | None, dimension: int) -> Statistics | None:
        """The statistics of all processes' images, the same on each; None where no process has an image."""
        if self.count == 1:
            return own
        if own is None:
            own = Statistics(torch.zeros(dimension).double(), torch.zeros(dimension, dimension).double(), 0)
        packed = torch.cat([torch.tensor([own.count]).double(), own.mean, own.covariance.flatten()])
        everyone = [torch.empty_like(packed) for _ in range(self.count)]
        dist.all_gather(everyone, packed)
        total: Statistics | None = None
        for part in everyone:
            count = int(part[0])
            if count == 0:
                continue
            mean, covariance = part[1 : dimension + 1], part[dimension + 1 :].view(dimension, dimension)
            found = Statistics(mean, covariance, count)
            total = found if total is None else total.merge(found)
        return total

    def gather(self, own: Tensor, total: int) -> Tensor:
        """All processes' rows, [total, …], in the order of the items that were shared out."""
        if self.count == 1:
            return own
        longest = -(-total // self.count)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        everyone = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(everyone, padded)
        return torch.stack(everyone, 1).flatten(0, 1)[:total]


ALONE = Processes()
"""One process that does everything."""


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the group that torchrun announces in the environment (gloo: the statistics travel as CPU tensors)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
        return
    dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
