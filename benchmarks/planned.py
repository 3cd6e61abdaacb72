"""Planned recipes against hand-made ones, at one budget: is `tcm plan` as good as a person?

`python -m benchmarks.planned OUT --budget 20m --case digits=digits --case emoji=path/to/emoji:recipe.toml …` plans for
each data set, fits the hand-made recipe to the same time on this machine, trains both side by side, one thread each,
and measures one and two steps. `docs/planning.md` has the figures. Started again, it resumes.

A hand-made recipe keeps its network, batch, learning rates, times and the proportions of its stages. Their lengths are
scaled to the budget, and with them what depends on lengths: warm-up, curriculum, the decay of the averages.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tcm.cli.plan import parse_budget, prepared_data
from tcm.data import open_dataset
from tcm.foundation.processes import Processes
from tcm.method.averaging import ConstantDecay
from tcm.planning.plan import OVERHEAD, make_plan
from tcm.planning.timing import seconds_per_step
from tcm.recipes.resolve import resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.training.adapting import adapted

THREADS = 1
"""Of each training, and of the steps that are timed: two trainings run side by side on two cores."""
SIDES = ("planned", "hand-made")
CONSOLE = Console()


@dataclass(frozen=True)
class Case:
    """A data set, and the shipped recipe that a person would take for it."""

    name: str
    data: str
    recipe: str

    @staticmethod
    def parse(text: str) -> "Case":
        name, _, rest = text.partition("=")
        data, _, recipe = rest.partition(":")
        return Case(name, data, recipe or name)


def scaled(recipe: Recipe, budget: float, data: str) -> Recipe:
    """The hand-made recipe, cut or stretched to the budget."""
    dataset, processes = open_dataset(data), Processes(torch.device("cpu"))
    seconds = sum(
        stage.steps * seconds_per_step(recipe, name, dataset, processes, patience=3.0)
        for name, stage in recipe.stages.items()
    )
    share = budget * (1 - OVERHEAD) / seconds
    stages = {}
    for name, stage in recipe.stages.items():
        steps = max(1, round(stage.steps * share))
        changes = {
            "steps": steps,
            "warmup": round(stage.warmup * share),
            "checkpoint_every": max(1, steps // 5),
            "sample_every": max(1, steps // 5),
            "averages": tuple(
                ConstantDecay(decay=1 - min(0.5, (1 - decay.decay) / share))
                if isinstance(decay, ConstantDecay)
                else decay
                for decay in stage.averages
            ),
        }
        if "curriculum" in type(stage).model_fields:
            curriculum = stage.curriculum
            changes["curriculum"] = type(curriculum)(curriculum.q, round(curriculum.d * share), curriculum.limit)
        stages[name] = stage.model_copy(update=changes)
    return recipe.model_copy(update={"stages": stages})


def write_recipes(case: Case, folder: Path, budget: float) -> None:
    """Both recipes, timed with all cores: run this while nothing else does."""
    folder.mkdir(parents=True, exist_ok=True)
    planned, hand_made = (folder / f"{side}.toml" for side in SIDES)
    prepared = folder / "data.zip"
    data = prepared_data(str(prepared) if prepared.exists() else case.data, prepared)
    if not planned.exists():
        plan = make_plan(open_dataset(data), data, budget, Processes(torch.device("cpu")), CONSOLE.print)
        planned.write_text(plan.toml(), "utf-8")
    if not hand_made.exists():
        recipe = adapted(resolve(case.recipe, [f"data.path={data}"]))
        hand_made.write_text(to_toml(scaled(recipe, budget, data)), "utf-8")


def train(case: Case, folder: Path, side: str) -> None:
    """`tcm train`, as a user types it, on one thread."""
    command = [sys.executable, "-m", "tcm", "train", str(folder / f"{side}.toml"), "--run", str(folder / side)]
    with (folder / f"{side}.log").open("a") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def score(case: Case, folder: Path, side: str, steps: int, count: int) -> float:
    """`tcm eval` of the last stage: the digits distance of the digits, that of efficientnet-lite0 of the others."""
    data = resolve(str(folder / f"{side}.toml")).data.path
    detector = "digits" if data == "digits" else "efficientnet-lite0"
    file = folder / f"{side}-{steps}.json"
    if not file.exists():
        command = [sys.executable, "-m", "tcm", "eval", str(folder / side), "--data", data, "--detector", detector]
        command += ["--count", str(count), "--steps", str(steps), "--seed", "1000000", "--json"]
        command += ["--scores", str(folder / "scores.jsonl")]
        command += [] if detector == "digits" else ["--reference-count", str(count)]
        file.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout, "utf-8")
    return float(json.loads(file.read_text("utf-8"))[0]["value"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", default="20m")
    parser.add_argument("--case", action="append", type=Case.parse, required=True, metavar="NAME=DATA[:RECIPE]")
    parser.add_argument("--count", type=int, default=5000, help="images to measure, and at most of the reference")
    parser.add_argument("--only", choices=("plan", "train", "score"), action="append")
    given = parser.parse_args()
    parts = given.only or ["plan", "train", "score"]
    torch.set_num_threads(THREADS)
    for case in given.case:
        folder = given.out / case.name
        if "plan" in parts:
            write_recipes(case, folder, parse_budget(given.budget))
        if "train" in parts:
            with ThreadPoolExecutor(len(SIDES)) as pool:
                list(pool.map(lambda side, at=folder, of=case: train(of, at, side), SIDES))
    if "score" in parts:
        table = Table("data", "planned", "hand-made", "planned, two steps", "hand-made, two steps", "ratio, one step")
        for case in given.case:
            found = [score(case, given.out / case.name, side, steps, given.count) for steps in (1, 2) for side in SIDES]
            table.add_row(case.name, *(f"{value:.4g}" for value in found), f"{found[0] / found[1]:.3f}")
        CONSOLE.print(table)


if __name__ == "__main__":
    main()
