"""fp32 against bf16 in a training step; contiguous against channels-last and eager against torch.compile in a pass."""

import time
from collections.abc import Callable
from itertools import product

import torch
from torch import nn

from benchmarks.cases import Case, ddpmpp, denoiser, small
from benchmarks.harness import Row, Settings, interleave, ratio
from benchmarks.stages import steps
from tcm.method.streams import SampleStreams

TITLE = "bf16 in a step of stage 1; memory format and torch.compile, forward and backward"
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 2), (small(settings), 5)):
        step = {name: steps(case, "consistency", f"consistency.precision={name}") for name in PRECISIONS}
        times = interleave(settings, step, rounds)
        rows.append(ratio(f"{case.size}: speed of a step, bf16 / fp32", times["fp32"], times["bf16"], "≥ 1.6"))
        network = denoiser(case.recipe(), "consistency").network
        runs = {
            f"{form}, {precision}": run_pass(case, network, form, precision)
            for form, precision in product(FORMATS, PRECISIONS)
        }
        times = interleave(settings, runs, rounds)
        plain, half = times["contiguous, fp32"], times["contiguous, bf16"]
        rows.append(ratio(f"{case.size}: speed of a pass, bf16 / fp32", plain, half))
        rows.append(ratio(f"{case.size}: channels-last / contiguous, fp32", times["channels-last, fp32"], plain))
        rows.append(ratio(f"{case.size}: channels-last / contiguous, bf16", times["channels-last, bf16"], half))
    return rows + compiled(settings)


def compiled(settings: Settings) -> list[Row]:
    """The small network with torch.compile, which the C++ compiler takes minutes for."""
    case = small(settings)
    network, other = (denoiser(case.recipe(), "consistency").network for _ in range(2))
    other.compile()
    runs = {
        "eager": run_pass(case, network, "contiguous", "fp32"),
        "compiled": run_pass(case, other, "contiguous", "fp32"),
    }
    started = time.perf_counter()
    runs["compiled"]()
    took = time.perf_counter() - started
    times = interleave(settings, runs, 3)
    return [
        Row(f"{case.size}: compiling, fp32", took, "s"),
        ratio(f"{case.size}: speed compiled / eager, fp32", times["eager"], times["compiled"]),
    ]


def run_pass(case: Case, network: nn.Module, form: str, precision: str) -> Callable[[], object]:
    """A forward and backward pass of the network in a memory format and a precision."""
    shape, count = (case.batch, 3, 32, 32), case.batch
    memory_format, dtype = FORMATS[form], PRECISIONS[precision]
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    labels = torch.zeros(count, dtype=torch.int64)
    drawn = network.draw_masks(SampleStreams(range(count)))
    masks = None if drawn is None else [mask.contiguous(memory_format=memory_format) for mask in drawn]

    def run() -> None:
        network.to(memory_format=memory_format)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = network(x, torch.zeros(count), labels, masks)
        torch.autograd.backward(out.float().square().mean())

    return run
