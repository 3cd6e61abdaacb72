"""Images shared out among the processes that torchrun starts, and what they found brought together again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tcm.data import Dataset
from tcm.data.hashing import hash_of
from tcm.foundation.processes import Processes
from tcm.method.gaussians import Statistics

Item = TypeVar("Item")

A_MINUTE = 60.0
ALONE = Processes(torch.device("cpu"))
"""One process that does everything."""


def share(processes: Processes, items: Sequence[Item]) -> list[Item]:
    """The items of this process: process r of n takes r, r + n, r + 2n, …

    >>> share(Processes(torch.device("cpu"), rank=1, count=2), [10, 11, 12, 13, 14])
    [11, 13]
    """
    return list(items[processes.rank :: processes.count])


def merge_statistics(processes: Processes, own: Statistics | None, dimension: int) -> Statistics | None:
    """The statistics of all processes' images, the same on each; None where no process has an image."""
    if processes.count == 1:
        return own
    if own is None:
        own = Statistics(torch.zeros(dimension).double(), torch.zeros(dimension, dimension).double(), 0)
    packed = torch.cat([torch.tensor([own.count]).double(), own.mean, own.covariance.flatten()])
    total: Statistics | None = None
    for part in _all(processes, packed):
        count = int(part[0])
        if count == 0:
            continue
        mean, covariance = part[1 : dimension + 1], part[dimension + 1 :].view(dimension, dimension)
        found = Statistics(mean, covariance, count)
        total = found if total is None else total.merge(found)
    return total


def shared_hash(processes: Processes, dataset: Dataset) -> str:
    """A data set's hash, found by the first process for all.

    This may take long. Every minute the first tells the others that it is still running, so that none of
    them gives up on it.
    """
    if processes.count == 1:
        return hash_of(dataset)
    found: list[str | None] = [None]
    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(hash_of, dataset) if processes.first else None
        while found[0] is None:
            with processes.agreeing(), suppress(TimeoutError):
                found = [None if hashing is None else hashing.result(A_MINUTE)]
            dist.broadcast_object_list(found)
    return str(found[0])


def gather_rows(processes: Processes, own: Tensor, total: int) -> Tensor:
    """All processes' rows, [total, …], in the order of the items that were shared out."""
    if processes.count == 1:
        return own
    longest = -(-total // processes.count)
    padded = own.new_zeros((longest, *own.shape[1:]))
    padded[: len(own)] = own
    return torch.stack(_all(processes, padded), 1).flatten(0, 1)[:total]


def _all(processes: Processes, own: Tensor) -> list[Tensor]:
    """Everyone's tensor, by way of the devices, which is where some back-ends need it."""
    here = own.to(processes.device)
    everyone = [torch.empty_like(here) for _ in range(processes.count)]
    dist.all_gather(everyone, here)
    return [tensor.cpu() for tensor in everyone]
