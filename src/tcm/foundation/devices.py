"""The one place that knows about kinds of devices."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tcm.foundation.duals import parts
from tcm.foundation.errors import TcmError


def best_device() -> torch.device:
    """The device to use when the user names none: an accelerator if there is one, else the CPU."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator
    return torch.device("cpu")


def available_devices() -> list[str]:
    """Names of all usable devices.

    >>> "cpu" in available_devices()
    True
    """
    names = ["cpu"]
    accelerator = best_device()
    if accelerator.type != "cpu":
        names += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return names


def fix_threads(count: int) -> None:
    """Let this process, and those that it starts, compute with `count` threads."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def choose_device(kind: str, worker: int) -> None:
    """Let a process that works beside others use the accelerator of its number, or one thread of the CPU.

    What follows finds it with `chosen_device`.
    """
    if kind == "cpu":
        fix_threads(1)
    else:
        torch.accelerator.set_device_index(worker % torch.accelerator.device_count())


def chosen_device(kind: str) -> torch.device:
    """The device of this kind that this process uses.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; a copy from the CPU to an accelerator does not hold up the CPU.

    >>> to_device(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    # Pinning has no forward-mode derivative.
    if device.type == "cuda" and tensor.device.type == "cpu" and parts(tensor)[1] is None:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether `device` computes in bfloat16 natively (on a CPU: AVX512-BF16 or AMX)."""
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "mps"


@contextmanager
def fp32_products(arithmetic: Literal["ieee", "tf32"]) -> Iterator[None]:
    """While the block runs, float32 products are IEEE's, or TF32's (10 bits of mantissa) where the device has it.

    torch's own default on NVIDIA cards is IEEE for matrix products, but TF32 for convolutions.

    >>> with fp32_products("ieee"):
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    # An operation's own setting wins over torch.backends.fp32_precision, which says it for all.
    operations = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    )
    before = [operation.fp32_precision for operation in operations]
    try:
        for operation in operations:
            operation.fp32_precision = arithmetic
        yield
    finally:
        for operation, value in zip(operations, before, strict=True):
            operation.fp32_precision = value


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """While the block runs, and if it is `wanted`, torch takes only kernels that give the same bits each time.

    An operation that has no such kernel on the device is an error. On a CPU, all that training uses are of this kind.

    >>> with deterministic_kernels(True):
    ...     torch.are_deterministic_algorithms_enabled()
    True
    """
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses; read at its first use
    torch.use_deterministic_algorithms(before or wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on `device`; on a CPU half of all there is (4 GiB if unknown), which other programs share.

    >>> free_memory(torch.device("cpu")) > 0
    True
    """
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except AttributeError:  # on Windows
        return 4 * 2**30


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held on `device` so far; 0 on Windows' CPUs, where Python cannot tell."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def memory_errors(remedy: Callable[[], str]) -> Iterator[None]:
    """Within the block, an error of whatever found no memory, on any device, is one that the user can fix.

    >>> with memory_errors(lambda: "take fewer"):
    ...     torch.empty(2**50)
    Traceback (most recent call last):
    ...
    tcm.foundation.errors.TcmError: out of memory (... you tried to allocate 4503599627370496 bytes...); take fewer
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "out of memory" not in text and "you tried to allocate" not in text:
            raise
        raise TcmError(f"out of memory ({text or type(error).__name__}); {remedy()}") from error
