"""Stored trajectories reach the objective with their images, are part of the data's identity, and are learned from."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from inprocess import ALONE, DEFAULTS, train
from launching import losses
from oracles import Exact, gaussian_consistency, gaussian_denoiser
from rich.console import Console
from stored_noise import TIMES, GaussianPairs, OneStepSampler, Regression, S, point
from typer.testing import CliRunner

from tcm.cli.main import app
from tcm.data import ArrayDataset, Batches, open_dataset
from tcm.data.pixels import to_float
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.objectives import Batch, Trajectory
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import Recipe
from tcm.training.run import Run
from tcm.training.stage_models import Sources, card_of, stage_models
from tcm.training.trainer import Trainer
from tcm.weights import Model

ROUNDING = 1.001 / 127.5
"""Between the teacher's image and its pixels; `to_uint8` truncates."""

RECIPE = """
extends = "digits"
order = ["pairs"]
adapts = false
conditional = false
classes = "none"
t_max = 10.0
sigma_data = 0.3

[data]
path = "stored_noise:GaussianPairs"
flip = true

[network]
channels = 8
dropout = 0.0

[stages.pairs]
objective = "stored_noise:RegressionStage"
init = "scratch"
steps = 30
batch = 12
accumulation = 2
optimizer = "adam"
learning_rate = 5e-3
averages = [{ kind = "constant", decay = 0.5 }]
log_every = 1
sample_every = 0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "pairs.toml").write_text(RECIPE)
    return resolve(str(tmp_path / "pairs.toml"))


def trainer_of(recipe: Recipe) -> Trainer:
    card = card_of(recipe, "pairs", (1, 8, 8), None)
    models = stage_models(recipe, "pairs", card, Sources({}, None))
    return Run(recipe, Path("unused"), ALONE, Console(quiet=True), DEFAULTS)._trainer(recipe, "pairs", models)


def belong_together(batch: Batch) -> bool:
    """Each point lies on the trajectory that ends at its image."""
    assert batch.trajectory is not None
    assert batch.trajectory.t.tolist() == list(TIMES)
    x_T, x_1 = batch.trajectory.points.unbind(1)
    torch.testing.assert_close(x_1, point(x_T, 1.0))
    return bool(((point(x_T, 0.0).clamp(-1, 1) - batch.x).abs() <= ROUNDING).all())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_points_arrive_with_their_images(recipe: Recipe, workers: int, world: int) -> None:
    """Mirrored, read by workers, shared among processes, in micro-batches."""
    trainer, seen, plain = trainer_of(recipe), torch.empty(12, 1, 8, 8), Batches(GaussianPairs(), seed=3, batch=12)
    for rank in range(world):
        batches = Batches(GaussianPairs(), seed=3, batch=12, flip=True, rank=rank, world=world, workers=workers)
        (loaded,) = islice(batches.starting_at(5), 1)
        parts = [batch for batch, _ in trainer.micro_batches(loaded, 2)]
        assert [len(batch.x) for batch in parts] == [6 // world] * 2
        for batch in parts:
            assert belong_together(batch)
            seen[batch.index] = batch.x
    as_stored = to_float(plain.at(5).images)
    mirrored = [not torch.equal(a, b) for a, b in zip(seen, as_stored, strict=True)]
    assert 0 < sum(mirrored) < 12
    turned = torch.tensor(mirrored)[:, None, None, None]
    assert torch.equal(seen, torch.where(turned, as_stored.flip(-1), as_stored))


def test_shares_add_up_and_the_map_has_no_loss(recipe: Recipe) -> None:
    loaded, trainer = Batches(GaussianPairs(), seed=0, batch=12, flip=True).at(0), trainer_of(recipe)

    def total(parts: int, function: object) -> float:
        models = {"student": Exact(function, (1, 8, 8))}
        micro = [batch for batch, _ in trainer.micro_batches(loaded, parts)]
        found = [Regression().loss(models, batch, 0, SampleStreams(batch.index.tolist())) for batch in micro]
        return sum(float(losses.total.detach()) for losses in found)

    assert total(1, gaussian_consistency(S)) < ROUNDING
    assert total(1, gaussian_denoiser(S)) > 0.1, "the mean of all images is not the image of this noise"
    assert total(4, gaussian_denoiser(S)) == pytest.approx(total(1, gaussian_denoiser(S)), rel=1e-5)


def test_the_points_are_part_of_the_content() -> None:
    data, other, later = GaussianPairs(), GaussianPairs(), GaussianPairs()
    assert data.content_hash() == other.content_hash()
    other.points = other.points.clone()
    other.points[-1, -1, 0, 0, 0] += 1e-3
    later.times = later.times * 2
    bare = ArrayDataset(data.pixels(np.arange(data.count)))
    assert len({one.content_hash() for one in (data, other, later, bare)}) == 4


def test_it_learns_samples_and_reports(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    train(recipe, run)
    course = losses(run / "1-pairs")
    assert np.mean(course[-5:]) < np.mean(course[:5]) / 2
    model = Model.load(run / "1-pairs" / "model")
    assert isinstance(model.sampler, OneStepSampler)
    assert model.card.provenance.data == GaussianPairs().content_hash()
    noise = SampleStreams(range(4)).normal((1, 8, 8))
    truth = point(TIMES[0] * noise, 0.0)
    assert float((model.sample(4) - truth).abs().mean()) < float(truth.abs().mean()) / 2, "noise it has not seen"

    result = CliRunner().invoke(app, ["report", str(run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    page = (run / "report.html").read_text("utf-8")
    assert "regression on stored pairs" in page
    assert "Densities of the training times" not in page, "it draws none"


def test_data_without_trajectories(recipe: Recipe, tmp_path: Path) -> None:
    bare = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": "digits", "flip": False})})
    with pytest.raises(TcmError, match="the data has no trajectories to learn from"):
        train(bare, tmp_path / "run")


class TooFew(GaussianPairs):
    """Forgets a point."""

    def trajectory(self, indices: np.ndarray) -> Trajectory:
        return Trajectory(self.points[indices][1:], self.times)


class NoTimes(GaussianPairs):
    """A time for each image."""

    def trajectory(self, indices: np.ndarray) -> Trajectory:
        return Trajectory(self.points[indices], self.times.expand(len(indices), 2))


@pytest.mark.parametrize(("data", "shape"), [(TooFew, "[3, 2, 1, 8, 8] at times of shape [2]"), (NoTimes, "[4, 2]")])
@pytest.mark.parametrize("workers", [0, 1])
def test_points_that_do_not_belong_to_the_images(data: type[GaussianPairs], shape: str, workers: int) -> None:
    with pytest.raises(TcmError) as caught:
        next(Batches(data(), seed=0, batch=4, workers=workers).starting_at(0))
    assert shape in str(caught.value)
    assert "times [n]" in str(caught.value)


def test_points_are_not_converted_with_the_images() -> None:
    assert open_dataset("stored_noise:GaussianPairs", channels=1).trajectory(np.arange(2)) is not None
    with pytest.raises(TcmError, match=r"^channels=3 would not convert the trajectories .*; leave channels out$"):
        open_dataset("stored_noise:GaussianPairs", channels=3)
