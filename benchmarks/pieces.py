"""What the profile led to: resampling, group norm with SiLU, attention, each against other ways to compute it."""

from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cases import Case, ddpmpp, small
from benchmarks.harness import Row, Settings, in_fresh_process, interleave, peak_bytes, ratio
from benchmarks.stages import steps
from tcm.networks.layers import Resample, attend, norm_silu, resample

TITLE = "resampling, group norm with SiLU and attention against other ways to compute them"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 2), (small(settings), 5)):
        ways = {"as it is": (), "torch's resampling": ("resample",), "norm, then SiLU": ("norm_silu",)}
        times = interleave(settings, {name: step_with(case, others) for name, others in ways.items()}, rounds)
        mine = times.pop("as it is")
        rows += [ratio(f"{case.size}: step as it is / with {name}", mine, other) for name, other in times.items()]
        now, before = (in_fresh_process(peak, case, others) for others in ((), ("norm_silu",)))
        rows.append(Row(f"{case.size}: peak memory as it is / with norm, then SiLU", now / before, "×"))
    return rows + alone(settings)


def step_with(case: Case, others: tuple[str, ...]) -> Callable[[], object]:
    """A step of stage 1, some pieces of DDPM++ replaced by torch's own."""
    step = steps(case, "consistency")

    def run() -> None:
        with ExitStack() as stack:
            for name in others:
                other = {"resample": torch_resample, "norm_silu": apart}[name]
                stack.enter_context(patch(f"tcm.networks.ddpmpp.{name}", other))
            step()

    return run


def peak(case: Case, others: tuple[str, ...]) -> float:
    """Peak bytes of a process that makes a step."""
    step_with(case, others)()
    return peak_bytes()


def alone(settings: Settings) -> list[Row]:
    """Each piece by itself, forward and backward, at the size of DDPM++ with batch 8."""
    rows, norm = [], nn.GroupNorm(32, 256)
    for precision, dtype in PRECISIONS.items():
        x = torch.randn(8, 256, 32, 32, dtype=dtype)
        low = torch.randn(8, 256, 16, 16, dtype=dtype)
        heads = torch.randn(3, 8, 1, 256, 256, dtype=dtype)
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
                {"one function": lambda x: norm_silu(x, norm), "one after the other": lambda x: apart(x, norm)},
            ),
            "attention": (heads, {"torch's": lambda x: attend(*x), "two products": plain_attention}),
        }
        for piece, (given, ways) in pieces.items():
            runs = {name: both_passes(way, given) for name, way in ways.items()}
            mine, *others = interleave(settings, runs, rounds=15, warm=3).items()
            rows += [ratio(f"{piece}, {precision}: {mine[0]} / {name}", mine[1], times) for name, times in others]
    return rows


def both_passes(way: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    x = x.clone().requires_grad_()
    gradient = torch.ones_like(way(x))
    return lambda: torch.autograd.grad(way(x), x, gradient)


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


def apart(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    return F.silu(norm(x))


def plain_attention(x: Tensor) -> Tensor:
    q, k, v = x
    weights = (q.transpose(2, 3) @ k).div(q.shape[2] ** 0.5).softmax(-1)
    return v @ weights.transpose(2, 3)
