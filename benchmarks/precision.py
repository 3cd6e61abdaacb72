"""fp32 against bf16 in a training step; contiguous against channels-last in a pass."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.cases import Case, ddpmpp, denoiser, small
from benchmarks.harness import Row, Settings, interleave, ratio
from benchmarks.pieces import torch_resample
from benchmarks.stages import steps
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Labels

TITLE = "bf16 in a step of stage 1; memory formats, forward and backward"
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 3), (small(settings), 7)):
        step = {name: steps(case, "consistency", f"consistency.precision={name}") for name in PRECISIONS}
        times = interleave(settings, step, rounds)
        rows.append(ratio(f"{case.size}: speed of a step, bf16 / fp32", times["fp32"], times["bf16"], "≥ 1.6"))
        networks = {form: denoiser(case.recipe(), "consistency").network for form in FORMATS}
        runs = {
            f"{form}, {precision}": run_pass(case, networks[form], form, precision)
            for form, precision in product(FORMATS, PRECISIONS)
        }
        times = interleave(settings, runs, rounds)
        rows += [
            ratio(
                f"{case.size}: time of a pass, channels-last / contiguous, {precision}",
                times[f"channels-last, {precision}"],
                times[f"contiguous, {precision}"],
            )
            for precision in PRECISIONS
        ]
    return rows


def run_pass(case: Case, network: nn.Module, form: str, precision: str) -> Callable[[], object]:
    """A forward and backward pass of the network, whose weights take the memory format, in a precision."""
    shape, count = (case.batch, 3, 32, 32), case.batch
    memory_format, dtype = FORMATS[form], PRECISIONS[precision]
    network.to(memory_format=memory_format)
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    labels = Labels(torch.zeros(count, dtype=torch.int64))
    drawn = network.draw_masks(SampleStreams(range(count)))
    masks = None if drawn is None else [mask.contiguous(memory_format=memory_format) for mask in drawn]

    def run() -> None:
        network.zero_grad(set_to_none=True)
        # Ours makes contiguous images of all.
        other = patch("tcm.networks.ddpmpp.resample", torch_resample) if form == "channels-last" else nullcontext()
        with other, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = network(x, torch.zeros(count), labels, masks)
        torch.autograd.backward(out.float().square().mean())

    return run
