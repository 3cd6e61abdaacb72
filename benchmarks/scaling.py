"""Two processes of one thread against one, and the cost model behind `tcm recipes` against what a step really takes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import Case, ddpmpp, images, small, trainer
from benchmarks.harness import Row, Settings, Times, in_fresh_process, interleave, peak_bytes, ratio, spread
from benchmarks.roofline import peak_flops
from benchmarks.stages import peak, steps
from tcm.foundation.processes import Processes, join
from tcm.recipes.estimates import estimate

TITLE = "two processes against one; the cost model against measurements"
ROUNDS = {ddpmpp: 4, small: 7}


def measure(settings: Settings) -> list[Row]:
    rows, found = [], start(settings)
    for case, result in zip(cases(settings), found, strict=True):
        times: Times = result["times"]
        one, two, apart = times["one"], times["two"], times["apart"]
        rows += [
            spread(f"{case.size}: 1 process of 1 thread", [1 / value for value in one], "steps/s"),
            spread(f"{case.size}: 2 processes of 1 thread", [1 / value for value in two], "steps/s"),
            spread(
                f"{case.size}: efficiency of 2 processes",
                [a / (2 * b) for a, b in zip(one, two, strict=True)],
                "",
                "≥ 0.9 at the same whole batch",
            ),
            ratio(f"{case.size}: 2 processes / 2 that exchange nothing, time", two, apart),
        ]
        rows += predictions(settings, case, result["bytes"])
    return rows


def cases(settings: Settings) -> list[Case]:
    return [case(settings) for case in ROUNDS]


def start(settings: Settings) -> list[dict[str, Any]]:
    """Run this module in two processes of one thread; the first one's figures, for each case."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "--", "benchmarks.scaling", *flags(settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def flags(settings: Settings) -> list[str]:
    return ["--quick"] * settings.quick + ["--cpu-time"] * settings.cpu_time


def worker(settings: Settings) -> None:
    """Print the times of both processes' steps, by turns, and the bytes that one gives into a step's exchange."""
    with join("cpu") as processes:
        found = [contest(settings, case(settings), processes, rounds) for case, rounds in ROUNDS.items()]
        if processes.first:
            print(json.dumps(found))


def contest(settings: Settings, case: Case, processes: Processes, rounds: int) -> dict[str, Any]:
    """Steps of stage 1 by the first process alone, by both, and by both with half the batch and no exchange."""
    recipe, exchanged, calls = case.recipe(), 0, 0
    training, batches = trainer(recipe, "consistency", processes), images(recipe, "consistency", processes)

    def counting(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal exchanged
        exchanged += bucket.buffer().nbytes
        return allreduce_hook(None, bucket)

    assert isinstance(training.learner.loss, DistributedDataParallel)
    training.learner.loss.register_comm_hook(None, counting)

    def shared() -> None:
        nonlocal calls
        loaded = next(batches)
        training.step(loaded.step, loaded)
        calls += 1

    alone, half = steps(case, "consistency"), steps(replace(case, batch=case.batch // 2), "consistency")
    runs = {"one": alone if processes.first else lambda: None, "two": shared, "apart": half}
    times = interleave(settings, {name: together(processes, run) for name, run in runs.items()}, rounds)
    return {"times": times, "bytes": exchanged / calls}


def together(processes: Processes, run: Callable[[], object]) -> Callable[[], object]:
    """The run, from when all processes are ready until all have done it."""

    def waiting() -> None:
        processes.wait()
        run()
        processes.wait()

    return waiting


def predictions(settings: Settings, case: Case, exchanged: float) -> list[Row]:
    """The cost model's figures over measured ones."""
    recipe = case.recipe()
    stage = recipe.stages["consistency"]
    cost = estimate(recipe, stage)
    step = steps(case, "consistency")
    with FlopCounterMode(display=False) as counter:
        step()
    seconds = interleave(settings, {"step": step}, rounds=2)["step"]
    rate = max(peak_flops(settings, torch.float32).values())
    resident = in_fresh_process(peak, case, "consistency", "fp32") - in_fresh_process(imported)
    weights = 4 * cost.parameters
    return [
        Row(f"{case.size}: FLOPs of a step, predicted / counted", cost.step_flops / counter.get_total_flops(), "×"),
        Row(f"{case.size}: peak memory, predicted / measured", cost.memory.total / resident, "×"),
        Row(f"{case.size}: gradients exchanged, predicted / counted", weights / exchanged, "×"),
        spread(
            f"{case.size}: step at the machine's peak / measured", [cost.step_flops / rate / s for s in seconds], "×"
        ),
    ]


def imported() -> float:
    """Peak bytes of a process that only imports what a step needs and runs a convolution."""
    torch.nn.functional.conv2d(torch.zeros(1, 16, 8, 8), torch.zeros(16, 16, 3, 3))
    return peak_bytes()


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(Settings("--quick" in sys.argv, "--cpu-time" in sys.argv))
