"""A stage in this process: `Fit` with real parts, its objective exchanged where a test wants it."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from launching import lines, tiny_recipe
from rich.console import Console
from torch import Tensor

from tcm.data import open_dataset
from tcm.data.loader import Batches
from tcm.foundation.processes import Processes
from tcm.foundation.progress import PrintedProgress
from tcm.foundation.signals import StopRequest
from tcm.foundation.threads import usable_counts
from tcm.method.objectives import Objective
from tcm.recipes.lineage import roles_of
from tcm.recipes.schema import Recipe
from tcm.training.checkpoint import Checkpoints
from tcm.training.metrics import MetricsFile, time_bins
from tcm.training.run import Run, RunOptions
from tcm.training.stage_loop import StageLoop
from tcm.training.stage_models import card_of
from tcm.training.trainer import Trainer
from tcm.weights import Model

ALONE = Processes(torch.device("cpu"))
DEFAULTS = RunOptions()


def unchanged(objective: Objective) -> Objective:
    return objective


def begin(
    folder: Path, stage: str, wrap: Callable[[Objective], Objective] = unchanged, *overrides: str
) -> tuple[StageLoop, StopRequest]:
    """A stage without helpers, ready to run in `folder`."""
    recipe = tiny_recipe(12, *overrides)
    spec = recipe.stages[stage]
    dataset = open_dataset("digits")
    card = card_of(recipe, stage, dataset.shape, dataset.condition_kind)
    torch.manual_seed(0)
    trainer = Trainer(
        spec,
        wrap(spec.build(recipe)),
        {"student": Model.fresh(card).denoiser},
        {"student": roles_of(recipe, stage)["student"]},
        ALONE,
        seed=(recipe.seed, stage),
        bin_edges=time_bins(recipe.t_min, recipe.t_max),
    )
    (folder / "samples").mkdir(exist_ok=True)
    metrics = MetricsFile(folder / "metrics.jsonl")
    progress = PrintedProgress(Console(file=StringIO()), stage, spec.steps)
    batches = Batches(dataset, seed=recipe.seed, batch=spec.batch)
    checkpoints = Checkpoints(folder / "state", spec.keep, ALONE, spec.checkpoint_every)
    loop = StageLoop(trainer, batches, card, True, folder, checkpoints, progress, metrics, [], usable_counts(ALONE))
    return loop, StopRequest(patient=True)


def train(recipe: Recipe, folder: Path, options: RunOptions = DEFAULTS, processes: Processes = ALONE) -> str:
    """A whole run in this process; returns what it printed."""
    console = Console(file=StringIO(), width=200)
    Run(recipe, folder, processes, console, options).train()
    return console.file.getvalue()


def events(folder: Path) -> list[dict[str, Any]]:
    """The events of a stage's metrics."""
    return [line for line in lines(folder) if "event" in line]


def weights_of(loop: StageLoop) -> dict[str, Tensor]:
    """The student's weights."""
    return loop.trainer.student.state_dict()
