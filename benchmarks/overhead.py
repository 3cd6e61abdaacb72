"""What the training loop adds around forward, backward and optimiser, measured within the same steps."""

import io
import statistics
import tempfile
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from benchmarks.cases import Case, batches, ddpmpp, images, small, trainer
from benchmarks.harness import Row, Settings, Times, interleave, share, spread
from tcm.data.pixels import to_float
from tcm.foundation.progress import progress_of_stages
from tcm.foundation.signals import StopRequest
from tcm.method.objectives import Consistency, Draw
from tcm.training.checkpoint import Checkpoints
from tcm.training.guard import GuardState, judge
from tcm.training.metrics import MetricsFile, Window
from tcm.training.stage_loop import StageLoop
from tcm.training.trainer import Trainer
from tcm.weights import ModelCard

TITLE = "what the training loop adds to forward, backward and optimiser"


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, steps in ((ddpmpp(settings), 5), (small(settings), 8)):
        whole, bare = loop(settings, case, settings.rounds(steps))
        added = [100 * (a - b) / b for a, b in zip(whole, bare, strict=True)]
        rows.append(spread(f"{case.size}: all that the loop adds, logging in each step", added, "%", "≤ 2 %"))
        typical = statistics.median(bare)
        rows += [
            share(f"{case.size}: … {name}", values, [typical] * len(values))
            for name, values in parts(settings, case).items()
        ]
    return rows


def loop(settings: Settings, case: Case, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each whole turn of the real loop, and of forward, backward and optimiser within it.

    The loop writes metrics.jsonl and a live line in each step; its checkpoints are left out.
    """
    # One step to warm up, and the last turn ends where another would begin.
    recipe = case.recipe(f"consistency.steps={steps + 2}", "consistency.log_every=1", "consistency.sample_every=0")
    training = trainer(recipe, "consistency")
    begun: list[float] = []
    inner: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = settings.now()
            result = function(*arguments)
            inner[-1] += settings.now() - started
            return result

        return run

    def noted(self: Trainer, *arguments: Any) -> Any:
        begun.append(settings.now())
        inner.append(0.0)
        return step(self, *arguments)

    step = Trainer.step
    optimizer = training.learner.optimizer
    optimizer.step = timed(optimizer.step)
    assert recipe.image_shape is not None
    card = ModelCard(kind="consistency", network=recipe.network, image_shape=recipe.image_shape)
    console = Console(file=io.StringIO(), force_terminal=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(MetricsFile(Path(folder) / "metrics.jsonl")) as metrics,
        progress_of_stages(console) as show,
        patch.object(Consistency, "loss_at", timed_method(timed, Consistency.loss_at)),
        patch("torch.autograd.backward", timed(torch.autograd.backward)),
        patch.object(Trainer, "step", noted),
        patch.object(Checkpoints, "save"),
    ):
        checkpoints = Checkpoints(Path(folder) / "state", 1, training.processes)
        data, progress = batches(recipe, "consistency"), show("consistency", steps)
        stage_loop = StageLoop(training, data, card, True, Path(folder), checkpoints, progress, metrics, [])
        stage_loop.run(StopRequest(patient=False))
    whole = [after - before for before, after in pairwise(begun[1:])]
    return whole, inner[1:-1]


def timed_method(timed: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A timed function that binds to its object."""

    def run(self: object, *arguments: Any) -> Any:
        return timed(method)(self, *arguments)

    return run


def parts(settings: Settings, case: Case) -> Times:
    """Seconds of single things that the loop adds."""
    recipe = case.recipe()
    training, loaded_batches, window = trainer(recipe, "consistency"), images(recipe, "consistency"), Window()
    objective, models, student = training.objective, training.models, training.student
    assert isinstance(objective, Consistency)
    loaded = next(loaded_batches)

    ((batch, _),) = training.micro_batches(loaded, 1)

    def draw() -> Draw:
        return objective.draw(models, batch, training.streams(0, batch))

    with torch.no_grad():
        losses = objective.loss_at(models, batch, 0, draw())
    for parameter in student.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return interleave(
        settings,
        {
            "data": lambda: to_float(next(loaded_batches).images),
            "times, noise and masks": draw,
            "metrics": lambda: (
                training._bin(losses),
                window.add({"loss": 0.0, "gradient_norm": 1.0}, [0.0] * 20, case.batch),
            ),
            "gradient norm": training.learner.clip,
            "guard": lambda: judge(training.stage.guard, GuardState(), 1.0, 1.0),
            "averages": lambda: [average.update(student, 1) for average in training.learner.averages],
        },
        rounds=10,
        warm=2,
    )
