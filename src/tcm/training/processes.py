"""The processes that share a run: torch's own engine, from one process to many nodes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tcm.devices import best_device
from tcm.errors import TcmError


@dataclass(frozen=True)
class Processes:
    """This process's place among all that share the run."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def join(device: str | None = None) -> Iterator[Processes]:
    """Join the processes that torchrun started; alone without torchrun.

    >>> with join("cpu") as processes:
    ...     processes.count
    1
    """
    if "WORLD_SIZE" not in os.environ:
        yield Processes(_device(device, 0))
        return
    here = _device(device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(here))
    try:
        yield Processes(here, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def shard(denoiser: nn.Module) -> None:
    """Share the weights, gradients and optimiser state of a denoiser among the processes, block by block (FSDP2)."""
    for module in denoiser.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    # The root too gives its weights back after each pass: averages are exchanged between passes.
    fully_shard(denoiser, reshard_after_forward=True)


def _device(name: str | None, local_rank: int) -> torch.device:
    try:
        device = best_device() if name is None else torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TcmError(f"device={name} is not usable here; see the devices that `tcm doctor` lists") from error
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    return device
