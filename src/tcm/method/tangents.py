"""df/dt, the derivative of f along a trajectory, by forward mode: what TCM Eq. 4 compares in the limit Δ_t → 0."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level
from torch.nn.attention import SDPBackend, sdpa_kernel

from tcm.foundation.duals import dual, parts
from tcm.method.conditions import Condition
from tcm.method.preconditioning import Denoiser, Masks, column


@torch.no_grad()
def tangent(
    f: Denoiser,
    x_t: Tensor,
    t: Tensor,
    dx_dt: Tensor,
    condition: Condition | None = None,
    masks: Masks | None = None,
) -> Tensor:
    """df/dt = ∂f/∂x (x_t, t) dx/dt + ∂f/∂t (x_t, t): about two forward passes, and nothing is kept for a gradient.

    It is 0 where f is consistent along the trajectory: d/dt f(x_t, t) = 0. A difference f(x_t, t) − f(x_r, r) drowns in
    the rounding of its terms; this is a product of derivatives, and keeps the network's relative precision.
    """
    # df/d(ln t) = t df/dt is of the same size at every t: in float16, dx/dt itself would underflow at large t.
    with _differentiable_kernels(), dual_level():
        f_t = f(dual(x_t, column(t, x_t) * dx_dt), dual(t, t), condition, masks)
        _, df_dlnt = parts(f_t)
    assert df_dlnt is not None, "f depends on t"
    return df_dlnt / column(t, x_t)


@contextmanager
def _differentiable_kernels() -> Iterator[None]:
    """Fused attention has no forward-mode derivative, and a compiled network may lose it without a word."""
    compiled = "torch._dynamo" in sys.modules  # importing it only to find nothing compiled takes seconds
    with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
