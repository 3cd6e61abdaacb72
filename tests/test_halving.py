"""Progressive distillation: the segment target against closed forms, and three rounds from a recipe."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from halving import GridSampler, Halving, grid, unmove
from hypothesis import given
from hypothesis import strategies as st
from inprocess import ALONE, DEFAULTS, train
from launching import losses
from oracles import Exact, Function, gaussian_denoiser
from rich.console import Console
from torch import Tensor

from tcm.data.pixels import to_float
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams, derive_seed
from tcm.method.objectives import Batch
from tcm.method.solvers import euler
from tcm.recipes.lineage import roles_of
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import Recipe
from tcm.report.records import read_run
from tcm.training.run import Run
from tcm.weights import Model

S, SHAPE, SPAN = 0.5, (1, 2, 2), (0.002, 80.0)

RECIPE = """
extends = "digits"
order = ["diffusion", "halving"]
adapts = false
conditional = false
classes = "none"
t_max = 10.0
network = { channels = 8 }

[stages.diffusion]
steps = 2
batch = 8
warmup = 0
sample_every = 0

[stages.halving]
objective = "halving:HalvingStage"
steps = 2
batch = 8
optimizer = "adam"
learning_rate = 1e-3
averages = [{ kind = "constant", decay = 0.5 }]
log_every = 1
rounds = [{ points = 4 }, { points = 2 }, { points = 1, steps = 3 }]
"""


def factor(t: float, r: float) -> float:
    """What an Euler step from t to r multiplies x by, for N(0, s²): r/t + (1 − r/t) s²/(s² + t²)."""
    return r / t + (1 - r / t) * S**2 / (S**2 + t**2)


def two_steps(points: int) -> Function:
    """The student that makes the exact teacher's two steps in one, at the times of its own grid.

    x_b = k x_t with k the product of two factors, so that Y = (t k − b)/(t − b) x_t.
    """
    fine = grid(2 * points, *SPAN)
    gains = {}
    for t, r, b in zip(fine[:-2:2], fine[1::2], fine[2::2], strict=True):
        gains[t] = (t * factor(t, r) * factor(r, b) - b) / (t - b)

    known = torch.tensor(list(gains), dtype=torch.float64)

    def student(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        nearest = (t.double().flatten()[:, None] - known).abs().argmin(1)
        return x * torch.tensor(list(gains.values()), dtype=torch.float64)[nearest][:, None, None, None].to(x)

    return student


def loss(points: int, student: Exact) -> float:
    models = {"student": student, "teacher": Exact(gaussian_denoiser(S), SHAPE)}
    batch = Batch.whole(S * torch.randn(64, *SHAPE, dtype=torch.float64))
    objective = Halving(tuple(grid(2 * points, *SPAN)))
    return float(objective.loss(models, batch, 0, SampleStreams(range(64))).total.detach())


@pytest.mark.parametrize("points", [1, 2, 4, 32])
def test_a_student_that_makes_two_steps_in_one_has_no_loss(points: int) -> None:
    student = Exact(two_steps(points), SHAPE)
    exact = loss(points, student)
    with torch.no_grad():
        student.gain.fill_(1.01)
    assert exact < 1e-6 * loss(points, student)


@given(st.integers(1, 64), st.floats(1e-3, 0.1), st.floats(1.0, 100.0))
def test_grids_are_nested(steps: int, low: float, high: float) -> None:
    """What a round's student learns to step between are times that the next round's teacher is asked for."""
    fine, coarse = grid(2 * steps, low, high), grid(steps, low, high)
    assert fine[::2] == pytest.approx(coarse, rel=1e-9)
    assert all(t > b >= 0 for t, b in pairwise(fine))


@given(st.floats(0.01, 80), st.floats(0, 0.99), st.floats(-3, 3), st.floats(-3, 3))
def test_unmove_undoes_a_step(t: float, share: float, x_hat: float, x_t: float) -> None:
    x, start = (torch.full((1, 1, 1, 1), value, dtype=torch.float64) for value in (x_hat, x_t))
    time, end = torch.tensor([t], dtype=torch.float64), torch.tensor([t * share], dtype=torch.float64)
    landed = euler(lambda _x, _t: x, start, time, end)
    torch.testing.assert_close(unmove(landed, start, time, end), x, atol=1e-10, rtol=1e-10)


def test_n_steps_of_the_student_are_2n_of_the_teacher() -> None:
    student, teacher = Exact(two_steps(4), SHAPE), Exact(gaussian_denoiser(S), SHAPE)
    for f in (student, teacher):
        f.t_min, f.t_max = SPAN
    (*_, one), (*_, other) = (
        GridSampler(points=points).run(f, SampleStreams([0, 1])) for points, f in ((4, student), (8, teacher))
    )
    torch.testing.assert_close(one.x, other.x, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    folder = tmp_path_factory.mktemp("halving")
    (folder / "halving.toml").write_text(RECIPE)
    recipe = resolve(str(folder / "halving.toml"))
    train(recipe, folder / "run")
    return recipe, folder / "run"


def test_each_round_halves_the_one_before(trained: tuple[Recipe, Path]) -> None:
    recipe, run = trained
    names = ["diffusion", "halving-1", "halving-2", "halving-3"]
    assert list(recipe.stages) == names
    assert [stage.steps for stage in recipe.stages.values()] == [2, 2, 2, 3]
    folders = [f"{index}-{name}" for index, name in enumerate(names)]
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == folders
    for name, folder, points in zip(names[1:], folders[1:], (4, 2, 1), strict=True):
        assert roles_of(recipe, name)["teacher"].source == "previous"
        assert len(losses(run / folder)) == recipe.stages[name].steps
        model = Model.load(run / folder / "model")
        assert model.sampler == GridSampler(points=points)
        assert len(list(model.sampler.run(model.denoiser, SampleStreams([0, 1])))) == points
        assert model.sample(2).isfinite().all()
        assert json.loads((run / folder / "model" / "config.json").read_text())["sampler"]["points"] == points
    assert [stage.spec.describe() for stage in read_run(run).stages[1:]] == [
        "8 steps become 4",
        "4 steps become 2",
        "2 steps become 1",
    ]


def test_a_round_learns_from_the_model_of_the_round_before(trained: tuple[Recipe, Path]) -> None:
    """Its first loss is that of a student and a teacher that are both the model before it."""
    recipe, run = trained
    plan = Run(recipe, run, ALONE, Console(quiet=True), DEFAULTS).check()
    loaded = next(iter(plan.batches["halving-2"].starting_at(0)))
    before = Model.load(run / "1-halving-1" / "model").denoiser
    seeds = [derive_seed(recipe.seed, "halving-2", 0, 0, int(index)) for index in loaded.index]
    batch = Batch(to_float(loaded.images), None, loaded.index, 8)
    objective = recipe.stages["halving-2"].build(recipe)
    found = objective.loss({"student": before, "teacher": before}, batch, 0, SampleStreams(seeds))
    assert losses(run / "2-halving-2")[0] == pytest.approx(float(found.total.detach()), rel=1e-5)


def test_a_round_needs_its_keys(tmp_path: Path) -> None:
    (tmp_path / "halving.toml").write_text(RECIPE.replace("{ points = 2 }", "{}"))
    with pytest.raises(TcmError, match=r"halving.toml: halving-2.points is missing; add it$"):
        resolve(str(tmp_path / "halving.toml"))
