"""Dual numbers (x, dx): a tensor that carries its derivative along, as torch's forward mode differentiates."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def dual(x: Tensor, dx: Tensor) -> Tensor:
    """(x, dx), inside `torch.autograd.forward_ad.dual_level`."""
    made: Tensor = forward_ad.make_dual(x, dx)  # type: ignore[no-untyped-call]
    return made


def parts(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x, and dx if it carries one; a compiled function is never given one.

    >>> parts(torch.ones(1))
    (tensor([1.]), None)
    """
    if torch.compiler.is_compiling():
        return x, None
    primal, tangent = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return primal, tangent
