"""A device that is not the CPU, for machines without an accelerator: it computes on the CPU and refuses to mix.

Tensors claim to live on torch's "meta" device and hold real values. An operation on such a tensor and a CPU tensor
of one or more dimensions fails, as it does on an accelerator, and so does reading values without a copy.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class Elsewhere(Tensor):
    """A tensor on the other device."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "Elsewhere":
        shell = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=ELSEWHERE
        )
        shell.values = values
        return shell

    def __repr__(self) -> str:
        return f"Elsewhere({self.values})"

    def tolist(self) -> Any:
        return self.values.tolist()

    def numpy(self) -> Any:
        raise TypeError("a tensor elsewhere has no numpy array; copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """While the block runs, `.to(ELSEWHERE)` and tensors made there give tensors on the other device."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


def _compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    is_elsewhere = len(here) < len(tensors)
    if is_elsewhere and operation not in COPIES and any(tensor.ndim for tensor in here):
        raise RuntimeError(f"{operation} mixes tensors of two devices")
    device = kwargs.get("device")
    if device is not None:
        is_elsewhere = torch.device(device) == ELSEWHERE
        kwargs = kwargs | {"device": torch.device("cpu")}
    unwrapped = tree_map(lambda leaf: leaf.values if isinstance(leaf, Elsewhere) else leaf, (args, kwargs))
    out = operation(*unwrapped[0], **unwrapped[1])
    if operation._schema.name.endswith("_") and isinstance(args[0], Tensor):
        return args[0]  # in place
    wrap = is_elsewhere and operation is not torch.ops.aten._local_scalar_dense.default
    return tree_map(lambda leaf: Elsewhere(leaf) if wrap and isinstance(leaf, Tensor) else leaf, out)
