"""Two processes of one thread against one, and the cost model behind `tcm recipes` against what a step really takes."""

import json
import os
import subprocess
import sys
import time

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import Case, images, small, trainer
from benchmarks.harness import Row, Settings, in_fresh_process, peak_bytes, spread
from benchmarks.roofline import peak_flops
from benchmarks.stages import peak, steps
from tcm.recipes.cost import estimate, scaling
from tcm.recipes.resolve import resolve
from tcm.training.processes import join

TITLE = "two processes against one; the cost model against measurements; predictions for 8 and 64 GPUs"
STEPS = 2


def measure(settings: Settings) -> list[Row]:
    case = small(settings)
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(settings.rounds(2)):
        for count, results in found.items():
            results.append(start(count, settings))
    one, two = ([result["seconds"] for result in results] for results in found.values())
    rows = [
        spread(f"{case.size}: steps/s, 1 process of 1 thread", [1 / value for value in one], "steps/s"),
        spread(f"{case.size}: steps/s, 2 processes of 1 thread", [1 / value for value in two], "steps/s"),
        spread(
            f"{case.size}: efficiency of 2 processes",
            [a / (2 * b) for a, b in zip(one, two, strict=True)],
            "",
            "≥ 0.9 at the same whole batch",
        ),
    ]
    return rows + predictions(settings, case, found[2][0]["bytes"]) + extrapolation()


def start(count: int, settings: Settings) -> dict[str, float]:
    """Run this module in `count` processes of one thread; the first one's figures."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "--", "benchmarks.scaling", *(["--quick"] if settings.quick else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def worker(settings: Settings) -> None:
    """Time the steps of stage 1 and count the bytes that this process gives into the exchange of gradients."""
    case, recipe = small(settings), small(settings).recipe()
    with join("cpu") as processes:
        training, batches = trainer(recipe, "consistency", processes), images(recipe, "consistency", processes)
        exchanged = 0

        def counting(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal exchanged
            exchanged += bucket.buffer().nbytes
            return allreduce_hook(None, bucket)

        if isinstance(training.loss, DistributedDataParallel):
            training.loss.register_comm_hook(None, counting)
        training.step(0, next(batches))
        exchanged = 0
        processes.wait()
        started = time.perf_counter()
        for step in range(1, STEPS + 1):
            training.step(step, next(batches))
        processes.wait()
        if processes.first:
            seconds = (time.perf_counter() - started) / STEPS
            print(json.dumps({"seconds": seconds, "bytes": exchanged / STEPS, "batch": case.batch}))


def predictions(settings: Settings, case: Case, exchanged: float) -> list[Row]:
    """The cost model's figures over measured ones."""
    recipe = case.recipe()
    stage = recipe.stages["consistency"]
    cost = estimate(recipe, stage)
    step = steps(case, "consistency")
    with FlopCounterMode(display=False) as counter:
        step()
    started = settings.now()
    step()
    seconds = settings.now() - started
    rate = max(peak_flops(settings, torch.float32).values())
    resident = in_fresh_process(peak, case, "consistency", "fp32") - in_fresh_process(imported)
    weights = 4 * cost.parameters
    return [
        Row(f"{case.size}: FLOPs of a step, predicted / counted", cost.step_flops / counter.get_total_flops(), "×"),
        Row(f"{case.size}: peak memory, predicted / measured", cost.memory.total / resident, "×"),
        Row(f"{case.size}: gradients exchanged, predicted / counted", weights / exchanged, "×"),
        Row(f"{case.size}: step at the machine's peak / measured", cost.step_flops / rate / seconds, "×"),
    ]


def imported() -> float:
    """Peak bytes of a process that only imports what a step needs and runs a convolution."""
    torch.nn.functional.conv2d(torch.zeros(1, 16, 8, 8), torch.zeros(16, 16, 3, 3))
    return peak_bytes()


def extrapolation() -> list[Row]:
    """Predicted, not measured: steps/s and efficiency of the paper's recipes on 8 and 64 GPUs."""
    rows = []
    for name in ("cifar10", "imagenet64-s", "imagenet64-xl"):
        recipe = resolve(name)
        stage = recipe.stages["truncated"]
        for count in (8, 64):
            found = scaling(recipe, stage, count)
            what = f"predicted: {name}, stage 2, {count} GPUs"
            rows.append(Row(f"{what}: steps/s", 1 / found.seconds, "steps/s"))
            rows.append(Row(f"{what}: efficiency if no exchange is hidden", found.efficiency))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(Settings(quick="--quick" in sys.argv))
