"""Tensors into a module, strictly: what is missing, unknown or misshapen is named."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tcm.foundation.errors import TcmError


def load_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], source: str, shown: Mapping[str, str] | None = None
) -> None:
    """Fill `module`, which was built on the meta device, with copies of `tensors` in its own precision.

    `shown` maps a file's own names to the module's, so that errors say the former.
    """
    check_tensors(module, tensors, source, shown)
    copies = {
        name: tensors[name].to(own.dtype, copy=True, memory_format=torch.contiguous_format)
        for name, own in module.state_dict().items()
    }
    module.load_state_dict(copies, assign=True)


def check_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], source: str, shown: Mapping[str, str] | None = None
) -> None:
    """An error unless `tensors` are exactly those of `module` in name and shape."""
    theirs = {ours: name for name, ours in (shown or {}).items()}
    wanted = module.state_dict()
    missing = [theirs.get(name, name) for name in wanted if name not in tensors]
    if missing:
        raise TcmError(f"{source} lacks {_some(missing)}; it belongs to another network or is incomplete")
    unknown = [theirs.get(name, name) for name in tensors if name not in wanted]
    if unknown:
        raise TcmError(f"{source} has {_some(unknown)}, which this network does not have; check the network's config")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise TcmError(
                f"{source}: {theirs.get(name, name)} has shape {list(tensor.shape)}, but this network needs "
                f"{list(wanted[name].shape)}; check the network's config"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
