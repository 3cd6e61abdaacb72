"""Tensors into a module, strictly: what is missing, unknown or misshapen is named, and sizes are bounded first."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from tcm.foundation.errors import TcmError
from tcm.foundation.files import open_regular

LARGEST_HEADER = 16 * 2**20
"""Bytes that name a safetensors file's tensors; a thousand tensors take 0.1 MB."""

Shapes = Mapping[str, Sequence[int]]


def shapes_in(path: Path) -> Shapes:
    """The tensors of a safetensors file by name, from its header alone."""
    with _opened(path) as opened:
        return {name: opened.get_slice(name).get_shape() for name in list(opened.keys())}


def metadata_in(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself in its header."""
    with _opened(path) as opened:
        return opened.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, of which only the header is read yet."""
    with _reading(path):
        with open_regular(path) as file:
            header = int.from_bytes(file.read(8), "little")
        if header > LARGEST_HEADER:
            raise TcmError(f"{path} is damaged (its header claims {header:,} bytes); copy or download it again")
        with safe_open(path, "pt") as opened:
            yield opened


def shapes_for_library(folder: str | Path) -> list[Sequence[int]]:
    """Those of the weights from which a library loads a model; of a hub id, the most that we allow."""
    if not Path(folder).is_dir():
        return [(2**33,)]
    return [shape for file in sorted(Path(folder).glob("*.safetensors")) for shape in shapes_in(file).values()]


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, whose header `shapes_in` has read."""
    with _reading(path):
        return load_file(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of a file of weights as those that a user can fix."""
    try:
        yield
    except FileNotFoundError as error:
        raise TcmError(f"{path} does not exist; a model folder holds config.json and weights as safetensors") from error
    except (SafetensorError, OSError) as error:
        raise TcmError(f"{path} is damaged ({error}); copy or download it again") from error


@contextmanager
def bounded_by(shapes: Collection[Sequence[int]], source: str) -> Iterator[None]:
    """While the block builds the network that the config at `source`, perhaps a stranger's, describes for tensors of
    these shapes: what is far more than they could fill is refused at once, and any error names the config.

    Modules say what they register; libraries register a tensor up to three times.
    """
    here = get_ident()
    tensors, elements = 1000 + 4 * len(shapes), 2**24 + 4 * sum(map(prod, shapes))

    def count(_module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        nonlocal tensors, elements
        if tensor is not None and get_ident() == here:  # the hooks are those of all threads
            tensors, elements = tensors - 1, elements - tensor.numel()
        if min(tensors, elements) < 0:
            raise TcmError("it describes a network with far more weights than there are; correct its config")

    with ExitStack() as hooks:
        hooks.enter_context(register_module_parameter_registration_hook(count))
        hooks.enter_context(register_module_buffer_registration_hook(count))
        try:
            yield
        except TcmError as error:
            raise TcmError(f"{source}: {error}") from error
        except Exception as error:  # a plug-in's or a library's network may raise anything
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise TcmError(f"{source} describes no network that can be built ({reason}); correct it") from error


def load_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], source: str, shown: Mapping[str, str] | None = None
) -> None:
    """Fill `module`, which was built on the meta device, with copies of `tensors` in its own precision.

    `shown` maps a file's own names to the module's, so that errors say the former.
    """
    check_tensors(module, {name: tensor.shape for name, tensor in tensors.items()}, source, shown)
    copies = {
        name: tensors[name].to(own.dtype, copy=True, memory_format=torch.contiguous_format)
        for name, own in module.state_dict().items()
    }
    module.load_state_dict(copies, assign=True)


def check_tensors(module: nn.Module, shapes: Shapes, source: str, shown: Mapping[str, str] | None = None) -> None:
    """An error unless these are exactly the tensors of `module` in name and shape."""
    theirs = {ours: name for name, ours in (shown or {}).items()}
    wanted = module.state_dict()
    missing = [theirs.get(name, name) for name in wanted if name not in shapes]
    if missing:
        raise TcmError(f"{source} lacks {_some(missing)}; it belongs to another network or is incomplete")
    unknown = [theirs.get(name, name) for name in shapes if name not in wanted]
    if unknown:
        raise TcmError(f"{source} has {_some(unknown)}, which this network does not have; check the network's config")
    for name, shape in shapes.items():
        if list(shape) != list(wanted[name].shape):
            raise TcmError(
                f"{source}: {theirs.get(name, name)} has shape {list(shape)}, but this network needs "
                f"{list(wanted[name].shape)}; check the network's config"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
