"""When to truncate, and where: `until-flat` and `auto` against fixed choices, on the digits, at equal cost.

`python -m benchmarks.truncating FOLDER [SEEDS]`: about half an hour on two idle cores for the five seeds of
docs/training.md (`0,1,2,3,4`). Stages 1 and 2 have 900 steps together: what stage 1 does not use, stage 2 gets.
Training times of stage 2 are in units of t' in all variants. Runs and scores are kept in FOLDER, so it can be stopped
and started again.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from io import StringIO
from itertools import product
from math import log
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.console import Console

from tcm.data import open_dataset
from tcm.evaluation.evaluate import evaluate_model
from tcm.evaluation.features import load_detector
from tcm.evaluation.generation import Sampling
from tcm.evaluation.references import reference_of
from tcm.foundation.processes import Processes
from tcm.recipes.decided import settled
from tcm.recipes.folders import RECIPE_FILE
from tcm.recipes.resolve import resolve
from tcm.training.run import Run
from tcm.weights import Model

SEEDS = (0, 1, 2, 3, 4)
TOTAL, LONGEST = 900, 675
FIXED_STEPS, FIXED_TIMES = (225, 450, 675), (0.5, 1.0, 2.0)
SAMPLES = 5000
SCORES = "scores.jsonl"
QUIET = ("*.sample_every=0", "*.checkpoint_every=10000", "*.keep=1")


@dataclass(frozen=True)
class Variant:
    """Stage 1 of so many steps, then t'; both None where the run decides."""

    steps: int | None
    t_prime: float | None

    @property
    def name(self) -> str:
        return "auto" if self.t_prime is None else f"{self.steps} steps, t' = {self.t_prime:g}"

    def overrides(self, second: int) -> list[str]:
        """The recipe's keys, with `second` steps of stage 2."""
        if self.t_prime is None:
            first = [f"consistency.steps={LONGEST}", "consistency.until_flat=true", "truncated.t_prime=auto"]
        else:
            times = f"truncated.times.mean={log(self.t_prime)}"
            first = [f"consistency.steps={self.steps}", f"truncated.t_prime={self.t_prime}", times]
        return [*first, f"truncated.steps={second}"]


VARIANTS = (Variant(None, None), *(Variant(steps, t) for steps, t in product(FIXED_STEPS, FIXED_TIMES)))


def train(folder: Path, overrides: Sequence[str]) -> None:
    """Train, resume or extend a run of the digits."""
    run = Run(
        resolve("digits", [*QUIET, *overrides]),
        folder,
        Processes(torch.device("cpu")),
        Console(file=StringIO()),
    )
    run.train()


def train_stage_0(folder: Path, seed: int) -> None:
    """Train the diffusion model that all variants of a seed share."""
    torch.set_num_threads(1)
    train(folder / f"{seed}" / "stage 0", [f"seed={seed}", 'order=["diffusion"]'])


def measure(folder: Path, seed: int, variants: Sequence[Variant]) -> list[dict[str, object]]:
    """Train variants that share stage 1, and measure the last model of each, with one and with two steps."""
    torch.set_num_threads(1)
    reference = reference_of(open_dataset("digits"), "digits", load_detector("digits"))
    rows: list[dict[str, object]] = []
    shared = folder / f"{seed}" / "stage 0"
    for variant in variants:
        run = folder / f"{seed}" / variant.name
        take_over(shared, run)
        train_variant(run, seed, variant)
        shared = run
        recipe, model = settled(resolve(str(run / RECIPE_FILE)), run), Model.load(run / "2-truncated" / "model")
        row = {"seed": seed, "variant": variant.name, "steps": recipe.stages["consistency"].steps}
        ways = {"one": Sampling(steps=1), "two": Sampling(steps=2)}
        distances = {
            way: evaluate_model(model, variant.name, range(SAMPLES), sampling, reference)[0].value
            for way, sampling in ways.items()
        }
        rows.append(row | {"t_prime": model.card.t_min} | distances)
    return rows


def take_over(source: Path, run: Path) -> None:
    """Copy the finished stages 0 and 1 of another run."""
    for stage in ("0-diffusion", "1-consistency"):
        if (source / stage / "model").is_dir() and not (run / stage).is_dir():
            aside = run / f"copy of {stage}"
            shutil.copytree(source / stage, aside, dirs_exist_ok=True)
            aside.rename(run / stage)


def train_variant(run: Path, seed: int, variant: Variant) -> None:
    """Train, or resume. Where stage 1 decides how long it is, stage 2 is begun, then extended to what is left."""
    first = variant.steps
    if first is None:
        if not (run / "2-truncated" / "model").is_dir():
            train(run, [f"seed={seed}", *variant.overrides(1)])
        first = settled(resolve(str(run / RECIPE_FILE)), run).stages["consistency"].steps
    train(run, [f"seed={seed}", *variant.overrides(TOTAL - first)])


def known(folder: Path) -> list[dict[str, object]]:
    file = folder / SCORES
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    """A Markdown table: means and deviations over seeds, and differences from `auto`, seed by seed."""
    found = {(row["variant"], row["seed"]): row for row in rows}
    yield "| stage 1, t' | one step | minus auto | two steps | minus auto |"
    yield "|---|---|---|---|---|"
    for variant in VARIANTS:
        seeds = [seed for name, seed in found if name == variant.name and ("auto", seed) in found]
        cells = [variant.name]
        for way in ("one", "two"):
            own = [float(str(found[variant.name, seed][way])) for seed in seeds]
            auto = [float(str(found["auto", seed][way])) for seed in seeds]
            cells += [spread(own), spread([a - b for a, b in zip(own, auto, strict=True)])]
        yield f"| {' | '.join(cells)} |"
    chosen = sorted((str(seed), row["steps"], row["t_prime"]) for (name, seed), row in found.items() if name == "auto")
    yield ""
    yield "auto chose " + "; ".join(f"seed {seed}: {steps} steps, t' = {t:g}" for seed, steps, t in chosen)


def spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else "–"


def main(folder: Path, seeds: Sequence[int] = SEEDS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    done = {(row["seed"], row["variant"]) for row in known(folder)}
    groups = [[variant for variant in VARIANTS if variant.steps == steps] for steps in (None, *FIXED_STEPS)]
    jobs = [(seed, group) for seed in seeds for group in groups if any((seed, v.name) not in done for v in group)]
    with ProcessPoolExecutor(2, get_context("spawn")) as workers:
        needed = sorted({seed for seed, _ in jobs})
        list(workers.map(train_stage_0, [folder] * len(needed), needed))
        for rows in workers.map(measure, [folder] * len(jobs), *zip(*jobs, strict=True)) if jobs else ():
            with (folder / SCORES).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows if (row["seed"], row["variant"]) not in done)
            print(*(json.dumps(row) for row in rows), sep="\n", flush=True)
    print("\n".join(table([row for row in known(folder) if row["seed"] in seeds])))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(tuple(map(int, text.split(","))) for text in sys.argv[2:]))
