"""What the profile led to: resampling, and group norm with SiLU, each against other ways to compute it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import sqrt
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases import Case, ddpmpp, small
from benchmarks.harness import Row, Settings, in_fresh_process, interleave, peak_bytes, ratio
from benchmarks.sampling import fresh
from benchmarks.stages import steps
from tcm.evaluation.generation import Sampling, generate
from tcm.method.preconditioning import Masks
from tcm.networks.ddpmpp import Block
from tcm.networks.layers import Resample, drop, resample

TITLE = "resampling, and group norm with SiLU, against other ways to compute them"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 3), (small(settings), 7)):
        runs = {name: step_with(case, other) for name, other in STEPS.items()}
        times = interleave(settings, runs, rounds)
        mine = times.pop("as it is")
        rows += [ratio(f"{case.size}: step as it is / with {name}", mine, other) for name, other in times.items()]
        now, other = (in_fresh_process(peak, case, name) for name in ("as it is", "norm and SiLU in one function"))
        rows.append(Row(f"{case.size}: peak memory as it is / with norm and SiLU in one function", now / other, "×"))
    return rows + sampling(settings) + alone(settings)


def sampling(settings: Settings) -> list[Row]:
    """One-step sampling of `cifar10-small`, 128 images at once."""
    model = fresh(small(settings))
    images = 8 if settings.quick else 128

    def run(name: str) -> Callable[[], object]:
        def sample() -> None:
            with STEPS[name]():
                list(generate(model, range(images), Sampling(1), images))

        return sample

    times = interleave(settings, {name: run(name) for name in ("as it is", "torch's resampling")}, rounds=7)
    what = f"cifar10-small: sampling {images} images as it is / with torch's resampling"
    return [ratio(what, times["as it is"], times["torch's resampling"])]


def step_with(case: Case, other: Callable[[], AbstractContextManager[object]]) -> Callable[[], object]:
    """A step of stage 1, a piece of DDPM++ replaced by another."""
    step = steps(case, "consistency")

    def run() -> None:
        with other():
            step()

    return run


def peak(case: Case, name: str) -> float:
    """Peak bytes of a process that makes a step."""
    step_with(case, STEPS[name])()
    return peak_bytes()


def alone(settings: Settings) -> list[Row]:
    """Each piece by itself, forward and backward, at the size of DDPM++ with batch 8."""
    rows, norm = [], nn.GroupNorm(32, 256)
    for precision, dtype in PRECISIONS.items():
        x = torch.randn(8, 256, 32, 32, dtype=dtype)
        low = torch.randn(8, 256, 16, 16, dtype=dtype)
        pieces: dict[str, tuple[Tensor, dict[str, Callable[[Tensor], Tensor]]]] = {
            "doubling": (
                low,
                {
                    "stacking": lambda x: resample(x, "up"),
                    "interpolate": lambda x: torch_resample(x, "up"),
                    "transposed convolution": double_by_convolution,
                },
            ),
            "halving": (
                x,
                {
                    "slices": lambda x: resample(x, "down"),
                    "avg_pool2d": lambda x: torch_resample(x, "down"),
                    "convolution": halve_by_convolution,
                },
            ),
            "group norm with SiLU": (
                x,
                {"one after the other": lambda x: F.silu(norm(x)), "one function": lambda x: norm_silu(x, norm)},
            ),
        }
        for piece, (given, ways) in pieces.items():
            runs = {name: both_passes(way, given, norm) for name, way in ways.items()}
            mine, *others = interleave(settings, runs, rounds=15, warm=3).items()
            rows += [ratio(f"{piece}, {precision}: {mine[0]} / {name}", mine[1], times) for name, times in others]
    return rows


def both_passes(way: Callable[[Tensor], Tensor], x: Tensor, norm: nn.GroupNorm) -> Callable[[], object]:
    x = x.clone().requires_grad_()
    inputs = [x, *norm.parameters()]
    gradient = torch.ones_like(way(x))
    return lambda: torch.autograd.grad(way(x), inputs, gradient, allow_unused=True)


def torch_resample(x: Tensor, mode: Resample) -> Tensor:
    match mode:
        case "keep":
            return x
        case "down":
            return F.avg_pool2d(x, 2)
        case "up":
            return F.interpolate(x, scale_factor=2, mode="nearest")


def double_by_convolution(x: Tensor) -> Tensor:
    channels = x.shape[1]
    return F.conv_transpose2d(x, torch.ones(channels, 1, 2, 2, dtype=x.dtype), stride=2, groups=channels)


def halve_by_convolution(x: Tensor) -> Tensor:
    channels = x.shape[1]
    return F.conv2d(x, torch.full((channels, 1, 2, 2), 0.25, dtype=x.dtype), stride=2, groups=channels)


class NormSiLU(torch.autograd.Function):
    """silu(group_norm(x)), which keeps x alone for the backward pass and normalises once more there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        normal, mean, rstd = group_norm(x, weight, bias, groups, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.groups, ctx.eps = groups, eps
        return F.silu(normal, inplace=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        normal, _, _ = group_norm(x, weight, bias, ctx.groups, ctx.eps)
        gradient = torch.ops.aten.silu_backward(gradients[0].contiguous(), normal)
        samples, channels, height, width = x.shape
        found = torch.ops.aten.native_group_norm_backward(
            gradient, x, mean, rstd, weight, samples, channels, height * width, ctx.groups, [True, True, True]
        )
        return *found, None, None


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    samples, channels, height, width = x.shape
    return torch.native_group_norm(x, weight, bias, samples, channels, height * width, groups, eps)


def norm_silu(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    return NormSiLU.apply(x.contiguous(), norm.weight, norm.bias, norm.num_groups, norm.eps)


def fused_block(self: Block, x: Tensor, emb: Tensor, masks: Masks | None, index: int) -> Tensor:
    """The forward pass of a block of DDPM++ with norm and SiLU in one function."""
    h = self.conv_0(resample(norm_silu(x, self.norm_0), self.resample))
    h = norm_silu(h + self.affine(emb)[:, :, None, None], self.norm_1)
    h = self.conv_1(drop(h, masks, index, self.dropout))
    x = resample(x, self.resample)
    x = (h + (x if self.skip is None else self.skip(x))) * sqrt(0.5)
    return x if self.attention is None else self.attention(x)


STEPS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": nullcontext,
    "torch's resampling": lambda: patch("tcm.networks.ddpmpp.resample", torch_resample),
    "norm and SiLU in one function": lambda: patch.object(Block, "forward", fused_block),
}
