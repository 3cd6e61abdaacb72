"""CM's consistency training: the schedules, the target's weights, and f that is the identity at epsilon."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from inprocess import ALONE, DEFAULTS, train
from launching import losses
from rich.console import Console
from scheduled_target import ScheduledTargetStage, UniformGrid
from torch import Tensor
from typer.testing import CliRunner

from tcm.cli.main import app
from tcm.data import Batches, open_dataset
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.curriculum import Spacing
from tcm.method.objectives import Batch
from tcm.method.preconditioning import EDM, Preconditioning, Shifted
from tcm.recipes.estimates import estimate
from tcm.recipes.resolve import resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.training.run import Run, RunOptions
from tcm.training.stage_models import Sources, card_of, stage_models
from tcm.training.trainer import Trainer
from tcm.weights import Model, inspect

EPSILON, N = 0.002, [2, 3, 4, 4, 5, 5]
"""N(k) for K = 6, s₀ = 2, s₁ = 4: √(4 + 21 k/6) is 2, 2.7, 3.3, 3.8, 4.2, 4.6."""

RECIPE = """
extends = "digits"
order = ["diffusion", "target"]
adapts = false
conditional = false
t_max = 10.0
preconditioning = { kind = "shifted", epsilon = 0.002 }
network = { channels = 8 }

[stages.diffusion]
steps = 3
batch = 8
warmup = 0
sample_every = 0

[stages.target]
objective = "scheduled_target:ScheduledTargetStage"
s1 = 4
steps = 6
batch = 8
optimizer = "radam"
learning_rate = 1e-2
averages = [{ kind = "constant", decay = 0.5 }]
log_every = 1
"""


def recipe_of(folder: Path, *overrides: str, text: str = RECIPE) -> Recipe:
    (folder / "target.toml").write_text(text)
    return resolve(str(folder / "target.toml"), overrides)


def trainer_of(recipe: Recipe) -> Trainer:
    """The stage from scratch."""
    card = card_of(recipe, "target", (1, 8, 8), None)
    models = stage_models(recipe, "target", card, Sources({}, None))
    return Run(recipe, Path("unused"), ALONE, Console(quiet=True), DEFAULTS)._trainer(recipe, "target", models)


ALONE_WORDS = ("order=['target']", "target.init=scratch")


def test_the_grid_and_the_decay_follow_the_steps(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    stage = recipe.stages["target"]
    assert isinstance(stage, ScheduledTargetStage)
    times = stage.build(recipe).times
    for k, count in enumerate(N):
        grid = times.at(k).times
        assert (len(grid), float(grid[0]), float(grid[-1])) == (count, EPSILON, 10.0)
        upper = times.at(k).quantile(torch.linspace(0, 1, 601)[:-1])
        assert sorted(upper.unique().tolist()) == grid[1:].tolist()
    follower, decay = stage.roles(recipe)["target"].follows
    assert follower == "student"
    assert [decay.beta(k + 1) for k in range(6)] == pytest.approx([0.9 ** (2 / count) for count in N], rel=1e-12)


def test_the_target_is_the_average_of_its_schedule(tmp_path: Path) -> None:
    """θ̄ ← μ(k) θ̄ + (1 − μ(k)) θ after each update, by hand in float64."""
    trainer = trainer_of(recipe_of(tmp_path, *ALONE_WORDS))
    batches = Batches(open_dataset("digits"), seed=0, batch=8)

    def weights(role: str) -> dict[str, Tensor]:
        return {name: tensor.double() for name, tensor in trainer.models[role].state_dict().items()}

    expected = weights("student")
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights("target").items())
    for k, count in enumerate(N):
        trainer.step(k, batches.at(k))
        mu = 0.9 ** (2 / count)
        student = weights("student")
        expected = {name: mu * expected[name] + (1 - mu) * student[name] for name in expected}
        torch.testing.assert_close(weights("target"), expected, rtol=1e-5, atol=1e-7)
    difference = max(float((expected[name] - student[name]).abs().max()) for name in expected)
    assert difference > 1e-4, "it lags behind"


def test_at_two_times_the_target_is_the_image_whatever_its_weights(tmp_path: Path) -> None:
    """N(0) = 2: the pair is (T, ε), and f̄ is the identity at ε."""
    recipe = recipe_of(tmp_path, *ALONE_WORDS)
    trainer = trainer_of(recipe)
    x, streams = torch.rand(4, 1, 8, 8) * 2 - 1, [SampleStreams(range(4)) for _ in range(3)]
    objective, batch = trainer.objective, Batch.whole(x)
    with torch.no_grad():
        before = objective.loss(trainer.models, batch, 0, streams[0]).weighted
        for parameter in trainer.models["target"].parameters():
            parameter.normal_(0, 3)
        after = objective.loss(trainer.models, batch, 0, streams[1]).weighted
        streams[2].uniform()
        eps = streams[2].normal((1, 8, 8))
        output = trainer.student(x + 10.0 * eps, torch.full((4,), 10.0, dtype=torch.float64))
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(before, (output - x - EPSILON * eps).square().sum((1, 2, 3)))


def test_train_load_sample_and_refuse_to_export(tmp_path: Path) -> None:
    recipe, run = recipe_of(tmp_path), tmp_path / "run"
    assert recipe.preconditioning == Shifted(EPSILON)
    (tmp_path / "written.toml").write_text(to_toml(recipe))
    assert resolve(str(tmp_path / "written.toml")) == recipe.model_copy(update={"name": "target"})
    train(recipe, run)
    assert len(losses(run / "1-target")) == 6
    folder = run / "1-target" / "model"
    written = json.loads((folder / "config.json").read_text())["preconditioning"]
    assert written == {"kind": "shifted", "epsilon": EPSILON}
    model = Model.load(folder)
    assert model.denoiser.preconditioning == model.card.preconditioning == Shifted(EPSILON)
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        for t in (torch.full((3,), EPSILON), torch.full((3,), EPSILON, dtype=torch.float64)):
            torch.testing.assert_close(model.denoiser(x, t), x)
    first, second = model.sampler.run(model.denoiser, SampleStreams([0, 1]), steps=2)
    assert torch.equal(model.sample(2, steps=2), second.x)
    assert not torch.equal(first.x, second.x)
    cost = estimate(recipe, recipe.stages["target"])
    assert cost.memory.helpers == 4 * cost.parameters, "the target"

    result = CliRunner().invoke(app, ["export", str(folder), "--to", "edm-state-dict"])
    assert isinstance(result.exception, TcmError)
    assert str(result.exception) == (
        "preconditioning=Shifted(epsilon=0.002, kind='shifted') cannot be exported: the reference has only EDM's; "
        'train with preconditioning = { kind = "edm" }'
    )
    assert not list(tmp_path.glob("**/*-edm.safetensors"))


def test_an_edm_model_can_be_where_it_starts(tmp_path: Path) -> None:
    """The same weights, made into f in another way: near T hardly a difference, at ε the identity."""
    teacher = tmp_path / "edm" / "0-diffusion" / "model"
    words = ("preconditioning={ kind = 'edm' }", "order=['diffusion']")
    train(recipe_of(tmp_path, *words), tmp_path / "edm")
    assert inspect(teacher).preconditioning == EDM()
    recipe = recipe_of(tmp_path, "order=['target']", "target.init=init")
    train(recipe, tmp_path / "run", RunOptions(init=str(teacher)))
    assert inspect(tmp_path / "run" / "1-target" / "model").preconditioning == Shifted(EPSILON)

    card = card_of(recipe, "target", (1, 8, 8), None)
    models = stage_models(recipe, "target", card, Sources({}, str(teacher)))
    given, student = Model.load(teacher).denoiser, models["student"].denoiser
    assert all(torch.equal(student.state_dict()[name], tensor) for name, tensor in given.state_dict().items())
    assert models["target"].denoiser.preconditioning == Shifted(EPSILON)
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        at = {t: [f(x, torch.full((2,), t)) for f in (given, student)] for t in (EPSILON, 10.0)}
    torch.testing.assert_close(at[EPSILON][1], x)
    assert not torch.allclose(at[EPSILON][0], x)
    torch.testing.assert_close(*at[10.0], rtol=1e-2, atol=1e-3)


def test_a_stage_may_have_a_preconditioning_of_its_own(tmp_path: Path) -> None:
    text = RECIPE.replace("ScheduledTargetStage", "ShiftedStage").replace("preconditioning", "# preconditioning")
    run = tmp_path / "run"
    train(recipe_of(tmp_path, text=text), run)
    found = [inspect(run / stage / "model").preconditioning for stage in ("0-diffusion", "1-target")]
    assert found == [EDM(), Shifted(EPSILON)]


@dataclass(frozen=True)
class Half(Preconditioning):
    """f is half of the network."""

    kind: str = "half"

    def c_skip(self, t: Tensor, sigma_data: float) -> Tensor:
        return torch.zeros_like(t)

    def c_out(self, t: Tensor, sigma_data: float) -> Tensor:
        return torch.full_like(t, 0.5)


@dataclass(frozen=True)
class Tenth(Spacing):
    """r = 0.9 t."""

    kind: str = "tenth"

    def delta(self, t: Tensor, step: int) -> Tensor:
        return t / 10


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("preconditioning.kind=half", "consistency.curriculum={ kind = 'tenth' }")
    with pytest.raises(TcmError, match=r"preconditioning.kind='half' is unknown; use one of edm, shifted"):
        resolve("digits", words[:1])
    about = tmp_path / "ways-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ways\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[tcm.parts]\nhalf = {__name__}:Half\ntenth = {__name__}:Tenth\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = resolve("digits", words)
    assert recipe.preconditioning == Half()
    assert recipe.stages["consistency"].curriculum == Tenth()
    model = Model.fresh(card_of(recipe, "consistency", (1, 8, 8), None))
    x, t = torch.randn(2, 1, 8, 8), torch.ones(2)
    with torch.no_grad():
        torch.testing.assert_close(
            model.denoiser(x, t), model.denoiser.network(x / (1 + 0.75**2) ** 0.5, 0 * t, None, None) / 2
        )
    model.save(tmp_path / "model")
    assert inspect(tmp_path / "model").preconditioning == Half()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("preconditioning.kind=shiftd", "preconditioning.kind='shiftd' is unknown; did you mean 'shifted'?"),
        ("preconditioning.epsilon=-1", "epsilon=-1, the time at which f is the identity, must be at least 0"),
        ("preconditioning.epsilon=inf", "preconditioning.epsilon=inf must be a finite number"),
        ("preconditioning.epsilom=1", "preconditioning.epsilom is not a known key; did you mean 'epsilon'?"),
        ("preconditioning=shifted", "preconditioning='shifted' must be a table"),
        (f"preconditioning.kind={UniformGrid.__module__}:UniformGrid", "is not a subclass of Preconditioning"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(TcmError) as caught:
        recipe_of(tmp_path, word)
    assert message in str(caught.value)
