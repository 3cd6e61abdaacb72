"""The processes that share a run: torch's own engine, from one process to many nodes."""

import ctypes
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event, Thread
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from tcm.foundation.devices import available_devices, best_device, memory_errors
from tcm.foundation.errors import TcmError
from tcm.foundation.signals import Stopped

T = TypeVar("T")

LESS_MEMORY = "use a smaller batch, or a device with more memory"

FAILURE = "failure"
"""The key under which the first process that fails says so to the others: its rank and exit code."""
LOOK_SECONDS = 0.5
"""How often a process looks whether another has failed."""
LOOKED = "looked"
"""The key under which each process says that it has looked for the last time."""
GRACE_SECONDS = 10.0
"""How long a process has to leave by itself once one has failed."""


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

        One process raises it, so that it is shown once; the others end quietly. The block must not wait for other
        processes in any other way.
        """
        if self.count == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        codes = self.gather(0 if error is None else _exit_code(error))
        if error is not None and not any(codes[: self.rank]):
            raise error
        if any(codes):
            raise SystemExit(max(codes))


@contextmanager
def join(device: str | None = None) -> Iterator[Processes]:
    """Join the processes that torchrun started; alone without torchrun.

    >>> with join("cpu") as processes:
    ...     processes.count
    1
    """
    if "WORLD_SIZE" not in os.environ:
        with memory_errors(lambda: LESS_MEMORY):
            yield Processes(_device(device, 0))
        return
    store, rank, count = next(rendezvous("env://"))
    dist.init_process_group(_backend(), store=store, rank=rank, world_size=count)
    try:
        with _failing_together(store, rank, count), warnings.catch_warnings():
            everyone = Processes(torch.device("cpu"), rank, count)
            with everyone.agreeing():
                here = _device(device, int(os.environ["LOCAL_RANK"]))
            # Gradients of some 1×1 convolutions come with other strides, which DDP's copy into its buckets fixes.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            with memory_errors(lambda: LESS_MEMORY):
                yield replace(everyone, device=here)
    finally:
        dist.destroy_process_group()


@contextmanager
def _failing_together(store: Store, rank: int, count: int) -> Iterator[None]:
    """An error of one process ends them all in seconds, wherever they are; only the first that fails shows its error.

    What the others wait for may never come, so a thread of each looks for failures, and ends what does not leave.
    """
    leaving, looked = Event(), Event()
    failures: list[str] = []

    def look() -> None:
        own, last = store.clone(), False  # type: ignore[attr-defined]  # which torch does not declare
        with suppress(dist.DistError):
            while not last and not failures:
                last = leaving.wait(LOOK_SECONDS)
                if own.check([FAILURE]):
                    failures.append(own.get(FAILURE).decode())
            own.set(f"{LOOKED} {rank}", "")
        del own  # from here on the interpreter may end: nothing of torch's is in use
        looked.set()
        if failures:
            time.sleep(GRACE_SECONDS)
            os._exit(int(failures[0].split()[1]))

    Thread(target=look, daemon=True).start()
    try:
        yield
    except (SystemExit, Stopped):
        raise
    except BaseException as error:
        own = first = f"{rank} {_exit_code(error)}"
        with suppress(dist.DistError):  # without the first process, which keeps the store, nobody else can tell
            first = failures[0] if failures else store.compare_set(FAILURE, "", own).decode()
        if (group := dist.group.WORLD) is not None:
            group.abort()  # leave what is under way without waiting for it
            # Never freed: its end would wait for its threads, and hold Python's lock, for which they may wait.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if first != own:
            raise SystemExit(int(first.split()[1])) from error
        if rank or not isinstance(error, TcmError):
            error.add_note(f"(in process {rank} of {count})")
        raise
    finally:
        leaving.set()
        looked.wait(GRACE_SECONDS / 2)
        if failures and rank == 0:
            with suppress(dist.DistError):
                store.wait([f"{LOOKED} {other}" for other in range(count)], timedelta(seconds=GRACE_SECONDS / 2))


def _exit_code(error: BaseException) -> int:
    return 2 if isinstance(error, TcmError) else 130 if isinstance(error, KeyboardInterrupt) else 1


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
