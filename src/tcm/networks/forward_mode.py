"""Operations of which torch takes the forward-mode derivative slowly or not at all: here it is written out.

Without a tangent each is torch's own. Given a dual number (x, dx) it returns (y, dy); weights have no tangent.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tcm.foundation.duals import dual, parts


def scale_(x: Tensor, factor: float) -> Tensor:
    """x times a number, in place."""
    x, dx = parts(x)
    return x.mul_(factor) if dx is None else dual(x.mul_(factor), dx.mul_(factor))


def scaled(x: Tensor, factor: Tensor | float) -> Tensor:
    """x times a number, or a mask."""
    x, dx = parts(x)
    return x * factor if dx is None else dual(x * factor, dx * factor)


def concatenated(a: Tensor, b: Tensor) -> Tensor:
    """The channels of a, then those of b."""
    (a, da), (b, db) = parts(a), parts(b)
    ab = torch.cat([a, b], dim=1)
    if da is None and db is None:
        return ab
    return dual(ab, torch.cat([torch.zeros_like(x) if dx is None else dx for x, dx in ((a, da), (b, db))], dim=1))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x wᵀ + b; dy = dx wᵀ."""
    x, dx = parts(x)
    y = F.linear(x, weight, bias)
    return y if dx is None else dual(y, F.linear(dx, weight))


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """w ∗ x + b, of the size of x; dy = w ∗ dx."""
    x, dx = parts(x)
    padding = weight.shape[-1] // 2
    y = F.conv2d(x, weight, bias, padding=padding)
    return y if dx is None else dual(y, F.conv2d(dx, weight, padding=padding))


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y = w x̂ + b with x̂ = (x − mean)/std over each group; dy = w (dx − mean(dx) − x̂ mean(x̂ dx))/std."""
    x, dx = parts(x)
    if dx is None:
        return F.group_norm(x, groups, weight, bias, eps)
    size = (x.shape[0], x.shape[1], x[0, 0].numel(), groups)
    y, mean, rstd = torch.native_group_norm(x, weight, bias, *size, eps)
    # The matrix from dx to dx̂ is symmetric, so that the kernel of the backward pass is that of the forward derivative.
    dx_hat, _, _ = torch.ops.aten.native_group_norm_backward(dx, x, mean, rstd, None, *size, [True, False, False])
    return dual(y, dx_hat.mul_(weight[:, None, None]))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·k/√d) v for q, k, v of shape (B, heads, positions, d); torch chooses the kernel."""
    if q.shape[0] == 0:  # some kernels refuse a batch of no rows
        return v
    (q, dq), (k, dk), (v, dv) = parts(q), parts(k), parts(v)
    if dq is None and dk is None and dv is None:
        return F.scaled_dot_product_attention(q, k, v)
    dq, dk, dv = (torch.zeros_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv)))
    return dual(*_attend_along(q, k, v, dq, dk, dv))


def _attend_along(q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """y = P v with P = softmax(S), S = q·k/√d; dy = (P ∘ dS) v − rowsum(P ∘ dS) y + P dv.

    The products are taken in the precision of q, k and v, the softmax in float32; q is scaled first, because the
    product alone can overflow in fp16.
    """
    scale = q.shape[-1] ** -0.5
    q, dq = q * scale, dq * scale
    P = (q @ k.mT).float().softmax(-1)
    dS = torch.cat([dq, q], -1) @ torch.cat([k, dk], -1).mT
    P_dS = P * dS.float()
    y, P_dv = (P.to(v.dtype) @ torch.cat([v, dv], -1)).chunk(2, -1)
    shift = P_dS.sum(-1, keepdim=True).to(v.dtype)
    return y.contiguous(), (P_dS.to(v.dtype) @ v).add_(P_dv).sub_(shift * y)
