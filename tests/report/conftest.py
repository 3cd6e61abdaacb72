"""Small runs, really trained: finished, measured, unfinished, failed, of other data."""

from pathlib import Path

import numpy as np
import pytest
import torch
from once import once
from rich.console import Console

from tcm.data import open_dataset
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import evaluate_model, model_subject
from tcm.evaluation.features import load_detector
from tcm.evaluation.generation import Sampling
from tcm.evaluation.references import reference_of
from tcm.evaluation.scores import append_scores
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.recipes.resolve import resolve
from tcm.training.run import Run
from tcm.weights import Model

FAIR = """
extends = "digits"
order = ["diffusion", "consistency", "continued", "truncated"]
[network]
channels = 8
blocks = 1
[stages.diffusion]
warmup = 0
steps = 6
batch = 8
log_every = 2
sample_every = 0
[stages.consistency]
watched_images = 16
steps = 6
batch = 8
log_every = 2
curriculum = {d = 2}
sample_every = 0
[stages.continued]
objective = "consistency"
init = "consistency"
teacher = "diffusion"
steps = 4
batch = 8
learning_rate = 5e-4
log_every = 2
sample_every = 0
[stages.truncated]
init = "consistency"
frozen = "consistency"
steps = 4
batch = 8
log_every = 2
sample_every = 0
"""


def train(recipe: str, folder: Path, overrides: tuple[str, ...] = ()) -> Path:
    run = Run(resolve(recipe, overrides), folder, Processes(torch.device("cpu")), Console(quiet=True))
    run.train()
    return folder


def write_recipe(folder: Path, text: str, name: str = "fair.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="session")
def fair_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages with the fair comparison; one-step distances and dFID measured, two-step ones not."""
    return once(tmp_path_factory, "fair", _make_fair_run) / "run"


@pytest.fixture(scope="session")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose second stage cannot recover; it has a grid of samples of the first."""
    return once(tmp_path_factory, "failed", _make_failed_run) / "run"


@pytest.fixture(scope="session")
def colour_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Colour images of 32 × 16 without labels, a diffusion stage only."""
    return once(tmp_path_factory, "colour", _make_colour_run) / "<colour> & run"


def _make_fair_run(folder: Path) -> None:
    run = train(write_recipe(folder, FAIR), folder / "run")
    dataset = open_dataset("digits")
    reference = reference_of(dataset, "digits", load_detector("digits"))
    for stage in ("0-diffusion", "1-consistency", "2-continued", "3-truncated"):
        model = Model.load(run / stage / "model")
        sampling = Sampling(steps=18 if stage == "0-diffusion" else 1)
        scores = evaluate_model(model, stage, range(80), sampling, reference)
        if stage != "0-diffusion":
            subject = model_subject(model, stage, None, 0)
            scores += denoising_distances(model_denoise(model), dataset, (0.2, 1.0, 5.0), reference, subject, 80)
        append_scores(run / "scores.jsonl", scores)


def _make_failed_run(folder: Path) -> None:
    recipe = write_recipe(folder, FAIR)
    overrides = (
        "diffusion.sample_every=6",
        "consistency.learning_rate=1e30",
        "consistency.steps=50",
        "consistency.sample_every=1",
        "consistency.guard={patience=1, retries=0}",
    )
    with pytest.raises(TcmError, match="does not recover"):
        train(recipe, folder / "run", overrides)


def _make_colour_run(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 16, 3), np.uint8)
    np.savez(folder / "images.npz", images=images)
    text = f"""
    [data]
    path = "{folder / "images.npz"}"
    [network]
    kind = "ddpmpp"
    channels = 8
    channel_mult = [1, 1]
    blocks = 1
    attention = []
    [stages.only]
    objective = "diffusion"
    init = "scratch"
    steps = 3
    batch = 4
    log_every = 1
    learning_rate = 1e-3
    """
    train(write_recipe(folder, text, "colour.toml"), folder / "<colour> & run")
