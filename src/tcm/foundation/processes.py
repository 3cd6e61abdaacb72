"""The processes that share a run: torch's own engine, from one process to many nodes."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tcm.foundation.devices import available_devices, best_device
from tcm.foundation.errors import TcmError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those that share the run."""

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

    def gather(self, value: T) -> list[T]:
        """The `value` of each process, in the order of their ranks."""
        values = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """All wait for one another at the end of the block, and an error of one is the error of all.

        The first process raises it, so that it is shown once; the others end quietly. The block must not wait for
        other processes in any other way.
        """
        if self.count == 1:
            yield
            return
        error: TcmError | None = None
        try:
            yield
        except TcmError as caught:
            error = caught
        messages = self.gather(None if error is None else str(error))
        message = next((message for message in messages if message is not None), None)
        if message is not None and self.first:
            raise TcmError(message) from error
        if message is not None:
            raise SystemExit(2)


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
    dist.init_process_group(_backend())
    try:
        everyone = Processes(torch.device("cpu"), dist.get_rank(), dist.get_world_size())
        with everyone.agreeing():
            here = _device(device, int(os.environ["LOCAL_RANK"]))
        with warnings.catch_warnings():
            # Gradients of some 1×1 convolutions come with other strides, which DDP's copy into its buckets fixes.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            yield replace(everyone, device=here)
    finally:
        dist.destroy_process_group()


def _backend() -> str:
    """Gloo for the CPU, and the accelerator's own backend."""
    accelerator = best_device()
    if accelerator.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


def _device(name: str | None, local_rank: int) -> torch.device:
    try:
        device = best_device() if name is None else torch.device(name)
    except RuntimeError as error:
        raise TcmError(f"device={name} is not a device; use one of {', '.join(available_devices())}") from error
    if device.type == "cpu":
        return device
    if device.index is None:
        device = torch.device(device.type, local_rank)
    if str(device) not in available_devices():
        raise TcmError(f"device={name or device} does not exist here; use one of {', '.join(available_devices())}")
    torch.accelerator.set_device_index(device.index)
    return device
