"""Sampling: images/s of one step, two steps and Heun (35 evaluations), interleaved.

`python -m benchmarks.sampling`: the 55.7 M DDPM++ of CIFAR-10 and a small network for the digits, with fresh weights
(speed does not depend on them). About two minutes on two idle cores (OMP_NUM_THREADS sets the threads).
"""

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

import tcm
from tcm.evaluation.sampling import Sampling, generate

ROUNDS = 2

LARGE = tcm.DDPMppConfig()
SMALL = tcm.DDPMppConfig(channels=32, channel_mult=(1, 2), blocks=1)
CASES = [
    ("DDPM++ 32×32×3", LARGE, (3, 32, 32), "consistency", Sampling(1), 8),
    ("DDPM++ 32×32×3", LARGE, (3, 32, 32), "consistency", Sampling(1, precision="bf16"), 8),
    ("DDPM++ 32×32×3", LARGE, (3, 32, 32), "consistency", Sampling(2), 4),
    ("DDPM++ 32×32×3", LARGE, (3, 32, 32), "diffusion", Sampling(18), 1),
    ("small 8×8×1", SMALL, (1, 8, 8), "consistency", Sampling(1), 512),
    ("small 8×8×1", SMALL, (1, 8, 8), "consistency", Sampling(2), 512),
    ("small 8×8×1", SMALL, (1, 8, 8), "diffusion", Sampling(18), 64),
]


def main() -> None:
    models = []
    for _, network, shape, kind, _, _ in CASES:
        card = tcm.ModelCard.model_validate({"kind": kind, "network": network, "image_shape": shape})
        models.append(tcm.Model.fresh(card))
    measured: list[list[float]] = [[] for _ in CASES]
    for turn in range(ROUNDS + 1):
        for (_, _, _, _, sampling, count), model, found in zip(CASES, models, measured, strict=True):
            start = time.perf_counter()
            list(generate(model, range(count), sampling, batch=64))
            if turn:  # the first round warms up
                found.append(count / (time.perf_counter() - start))
    table = Table(title=f"sampling, {torch.get_num_threads()} threads, median of {ROUNDS} interleaved rounds")
    for column in ("network", "parameters", "sampling", "images/s"):
        table.add_column(column, justify="right" if column in ("parameters", "images/s") else "left")
    for (name, _, _, _, sampling, _), model, found in zip(CASES, models, measured, strict=True):
        parameters = sum(parameter.numel() for parameter in model.denoiser.parameters())
        table.add_row(name, f"{parameters / 1e6:.2f} M", sampling.describe(model), f"{statistics.median(found):.3g}")
    Console().print(table)


if __name__ == "__main__":
    main()
