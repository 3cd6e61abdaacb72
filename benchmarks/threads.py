"""Threads on a busy machine: images per second of each fixed number, as torch has them, and as `tcm` chooses them.

Neighbours are processes that compute all the time. Each figure is a process of its own, and all take turns.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Row, Settings, spread
from tcm.data import ArrayDataset, Batches, ClassLabels, Dataset, open_dataset
from tcm.evaluation.generation import Sampling, generate
from tcm.foundation.processes import Processes
from tcm.foundation.threads import Threads, paced, usable_counts
from tcm.planning.timing import fresh_trainer, seconds_per_step
from tcm.recipes.resolve import resolve
from tcm.weights import load

TITLE = "threads, on a quiet and on a busy machine"
NEIGHBOUR = "while True: sum(range(10_000))"
WORKS = ("train digits", "train fashion-mnist", "sample fashion-mnist", "plan digits")


def measure(settings: Settings) -> list[Row]:
    works = WORKS[:1] if settings.quick else WORKS
    ways = {f"{count} threads" if count > 1 else "1 thread": str(count) for count in _counts()}
    ways |= {"before": "before", "auto": "auto"}
    rows = []
    for work in works:
        speeds: dict[tuple[int, str], list[float]] = {}
        for _ in range(settings.rounds(3)):
            for neighbours in (0, 1, 2):
                with busy(neighbours):
                    for name, way in ways.items():
                        speeds.setdefault((neighbours, name), []).append(_speed(work, way, settings))
        for neighbours in (0, 1, 2):
            found = {name: speeds[neighbours, name] for name in ways}
            where = f"{work}, {neighbours or 'no'} neighbour{'' if neighbours == 1 else 's'}"
            rows += [spread(f"{where}: {name}", values, "images/s") for name, values in found.items()]
            fixed = [name for name in ways if "thread" in name]
            best = [max(found[name][turn] for name in fixed) for turn in range(len(found["auto"]))]
            shares = [auto / most for auto, most in zip(found["auto"], best, strict=True)]
            rows.append(spread(f"{where}: auto / best fixed", shares, "×", goal="≥ 0.8"))
    return rows


def _counts() -> list[int]:
    return sorted({1, torch.get_num_threads()})


@contextmanager
def busy(neighbours: int) -> Iterator[None]:
    """While the block runs, so many other processes compute."""
    others = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(neighbours)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _speed(work: str, way: str, settings: Settings) -> float:
    """Images per second of a fresh process; `way` is a number of threads, `before` or `auto`."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    }
    if way != "before":
        environment["GOMP_SPINCOUNT"] = "20000"
    if way.isdecimal():
        environment["OMP_NUM_THREADS"] = way
    seconds = "2" if settings.quick else "6"
    command = [sys.executable, "-m", "benchmarks.threads", *work.split(), way, seconds]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, cwd=Path(__file__).parents[1])
    return float(json.loads(done.stdout.splitlines()[-1]))


def _rate(sizes: Iterator[int], seconds: float) -> float:
    """Sizes per second, from the second piece of work on: the first warms up."""
    next(sizes)
    began, images = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        images += next(sizes)
    return images / (time.perf_counter() - began)


def _noise(shape: tuple[int, int, int]) -> Dataset:
    pixels = np.random.default_rng(0).integers(0, 256, (1000, *shape), dtype=np.uint8)
    return ArrayDataset(pixels, ClassLabels.of(np.arange(1000) % 10, "noise", []))


def work_for(kind: str, name: str, way: str, seconds: float) -> float:
    """Images per second over `seconds`, measuring included, as `tcm` does the work."""
    here = Processes(torch.device("cpu"))
    counts = [torch.get_num_threads()] if way == "before" else usable_counts(here)
    if kind == "sample":
        model = load(name)
        drawn = (batch for _ in repeat(0) for batch in generate(model, range(64), Sampling(steps=1)))
        return _rate((len(batch) for batch in paced(drawn, counts)), seconds)
    recipe = resolve(name)
    data = open_dataset("digits") if recipe.image_shape == (1, 8, 8) else _noise(recipe.image_shape)
    if kind == "plan":
        batch = recipe.stages["truncated"].batch
        return batch / seconds_per_step(recipe, "truncated", data, here, seconds)
    trainer, threads = fresh_trainer(recipe, "truncated", data, here), Threads(counts)
    batch = recipe.stages["truncated"].batch
    batches = Batches(data, seed=0, batch=batch)

    def steps() -> Iterator[int]:
        for loaded in batches.starting_at(0):
            threads.settle(partial(trainer.rehearse, loaded.step, loaded), batch)
            threads.begin(trying=False)
            trainer.step(loaded.step, loaded)
            threads.end(batch)
            yield batch

    return _rate(steps(), seconds)


if __name__ == "__main__":
    print(json.dumps(work_for(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))))
