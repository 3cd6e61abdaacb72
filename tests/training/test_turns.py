"""More than one network in a stage: roles that learn in turns, and a role that is an average of another.

The objective is a small Diff-Instruct: a fake denoiser fits what the student generates, and the student moves its
images by the difference between the teacher's denoising and the fake's.
"""

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from typing import Literal

import pytest
import torch
from inprocess import ALONE, DEFAULTS, train
from launching import Launcher, fingerprint, lines, losses, tiny_recipe
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from tcm.data import open_dataset
from tcm.data.loader import Batches
from tcm.foundation.progress import PrintedProgress
from tcm.foundation.randomness import SampleStreams
from tcm.foundation.signals import StopRequest
from tcm.method.averaging import ConstantDecay, PowerDecay
from tcm.method.conditions import Classes
from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.method.objectives.base import draw
from tcm.method.preconditioning import c_out, column
from tcm.method.sampling import HeunSampler
from tcm.method.times import LogNormal, TimeDistribution
from tcm.recipes.estimates import estimate
from tcm.recipes.folders import stage_folders
from tcm.recipes.resolve import differences, resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Role, Rows, Setting, Stage, Turn
from tcm.report.drawing import shown_stage
from tcm.report.headline import measure_command
from tcm.report.records import read_run
from tcm.training.checkpoint import Checkpoints, Position
from tcm.training.metrics import MetricsFile
from tcm.training.run import Run
from tcm.training.stage_loop import StageLoop
from tcm.training.stage_models import Sources, card_of, models_of_stage, needed_stages, stage_models
from tcm.weights import Model


@dataclass(frozen=True)
class DiffInstruct(Objective):
    """The fake: E ‖fake(x_g + tε) − x_g‖²/(d c_out²). The student: its gradient in x_g is (fake − teacher)(x_g + tε)/d.

    From `ill` on, the fake's loss is not a number.
    """

    times: TimeDistribution
    ill: int | None = None

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        drawn, z = draw(self.times, models, batch, streams), streams.normal(batch.x.shape[1:])
        student, fake, teacher = (models[role] for role in ("student", "fake", "teacher"))
        T = torch.full((len(batch.x),), student.t_max, dtype=torch.float64)
        with torch.set_grad_enabled(turn == "student"):
            x_g = student(student.t_max * z, T, batch.condition)
        x_t = x_g.detach() + column(drawn.t, batch.x) * drawn.eps
        if turn == "fake":
            error = (fake(x_t, drawn.t, batch.condition) - x_g).flatten(1).square().mean(1)
            weighted = error / c_out(drawn.t, fake.sigma_data).float() ** 2
            if self.ill is not None and step >= self.ill:
                weighted = weighted * nan
        else:
            # Nothing here keeps the fake out of the graph: the trainer does.
            difference = fake(x_t, drawn.t, batch.condition) - teacher(x_t, drawn.t, batch.condition)
            weighted = (x_g * difference).flatten(1).mean(1)
        total = weighted.sum() / batch.B
        return Losses(total, {"part": total.detach()}, weighted.detach(), drawn.t)


class TurnsStage(Stage):
    """Two networks that learn, one that is an average of the student, and one that does neither."""

    objective: Literal["test_turns:TurnsStage"] = "test_turns:TurnsStage"
    teacher: str = "diffusion"

    def turns(self) -> tuple[Turn, ...]:
        return (Turn("fake"), Turn("student", every=2))

    def build(self, setting: Setting) -> DiffInstruct:
        return DiffInstruct(LogNormal(-1.2, 1.2).within(*self.span(setting)))

    def describe(self) -> str:
        return "distribution matching"

    def roles(self, setting: Setting) -> dict[str, Role]:
        return {
            "follower": Role(follows=("student", ConstantDecay(0.5))),
            "fake": Role("teacher", self.teacher, trained=True, source_sampler=HeunSampler),
            "teacher": Role("teacher", self.teacher, source_sampler=HeunSampler),
        }

    def rows(self) -> Rows:
        return Rows(gradient=2, plain=3)


class LowStart(TurnsStage):
    """The student maps noise of σ₀ = 2.5 to images; the fake learns at times up to 8, as in SiD."""

    objective: Literal["test_turns:LowStart"] = "test_turns:LowStart"

    def span(self, setting: Setting) -> tuple[float, float]:
        return setting.t_min, 8.0

    def start(self, setting: Setting) -> float:
        return 2.5


class HighStart(LowStart):
    """A start beyond T."""

    def start(self, setting: Setting) -> float:
        return 11.0


class Shadowed(TurnsStage):
    """The follower is a power average of the student."""

    def roles(self, setting: Setting) -> dict[str, Role]:
        return super().roles(setting) | {"follower": Role(follows=("student", PowerDecay(6.94)))}


class FakeAlone(TurnsStage):
    """The student never has its turn."""

    def turns(self) -> tuple[Turn, ...]:
        return (Turn("fake"),)


class IllStage(TurnsStage):
    """The fake's loss is not a number from step 3 on."""

    def build(self, setting: Setting) -> DiffInstruct:
        return DiffInstruct(LogNormal(-1.2, 1.2).within(*self.span(setting)), ill=3)


def recipe_with(kind: type[TurnsStage] = TurnsStage, **settings: object) -> Recipe:
    words = {"steps": 5, "batch": 8, "optimizer": "adam", "learning_rate": 1e-3}
    words |= {"log_every": 4, "checkpoint_every": 2, "sample_every": 0}
    base = tiny_recipe(2, "diffusion.batch=8", "network.channel_mult=[1]")
    stages = {"diffusion": base.stages["diffusion"], "turns": kind(**(words | settings))}
    return Recipe.model_validate({**{key: getattr(base, key) for key in base.model_fields_set}, "stages": stages})


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's recipe names this file's classes by a path from which it was not imported."""
    monkeypatch.setenv("TCM_TRUST", "test_turns")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(recipe_with(), folder)
    return folder


def begin(folder: Path, straight: Path, recipe: Recipe) -> StageLoop:
    """The stage of turns in a folder of its own, with the other run's teacher."""
    stage, dataset = recipe.stages["turns"], open_dataset("digits")
    card = card_of(recipe, "turns", dataset.shape, Classes(10))
    models = stage_models(recipe, "turns", card, Sources({"diffusion": straight / "0-diffusion" / "model"}, None))
    trainer = Run(recipe, folder, ALONE, Console(file=StringIO()), DEFAULTS)._trainer(recipe, "turns", models)
    folder.mkdir(exist_ok=True)
    return StageLoop(
        trainer,
        Batches(dataset, seed=recipe.seed, batch=stage.batch),
        card,
        True,
        folder,
        Checkpoints(folder / "state", stage.keep, ALONE),
        PrintedProgress(Console(file=StringIO()), "turns", stage.steps),
        MetricsFile(folder / "metrics.jsonl"),
        [],
        [1],
    )


def test_a_model_that_starts_below_T_generates(tmp_path: Path) -> None:
    """From noise of σ₀ on: while it is trained, in its folder, and as the result that a report shows."""
    recipe = recipe_with(LowStart, sample_every=5)
    objective = recipe.stages["turns"].build(recipe)
    assert objective.times.span == (recipe.t_min, 8.0)
    train(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "1-turns" / "samples" / "step-0000005.png").is_file()
    model = Model.load(tmp_path / "run" / "1-turns" / "model")
    assert (model.card.t_max, model.sampler.describe(model.denoiser, 2, None)) == (2.5, "times 2.5, 1")
    assert model.sample(2, steps=2).shape == (2, 1, 8, 8)
    record = read_run(tmp_path / "run")
    assert [(stage.spec.start(recipe), stage.generates) for stage in record.stages] == [(10.0, True), (2.5, True)]
    shown = shown_stage(record)
    assert shown is not None
    assert shown.name == "turns"
    assert "--dfid 0.05,0.2,0.5,1,2,2.5" in measure_command(record, shown, None)
    with pytest.raises(ValueError, match=r"second_time=3.0 must be at least 0.002, .* below 2.5, where its sampling"):
        Recipe.model_validate(recipe.model_dump() | {"second_time": 3.0})
    with pytest.raises(ValueError, match=r"turns starts sampling at 11, which must lie above 0.002, .* t_max=10"):
        recipe_with(HighStart)


def snapshot(loop: StageLoop) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in loop.trainer.tensors().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The beginnings of the names of all tensors that changed."""
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {name.partition(".network")[0] for name in changed}


STUDENT = {"student", "average.0", "optimizer", "follower"}
FAKE = {"fake", "fake.average.0", "fake.optimizer"}


def test_only_the_weights_whose_turn_it_is_move(straight: Path, tmp_path: Path) -> None:
    loop = begin(tmp_path / "both", straight, recipe_with())
    teacher = {name: tensor.clone() for name, tensor in loop.trainer.models["teacher"].state_dict().items()}
    states = [snapshot(loop)]
    for step in range(4):
        loop.trainer.step(step, loop.batches.at(step))
        states.append(snapshot(loop))
    turns = [moved(before, after) for before, after in pairwise(states)]
    assert turns == [STUDENT | FAKE, FAKE, STUDENT | FAKE, FAKE]
    after = loop.trainer.models["teacher"].state_dict()
    assert all(torch.equal(after[name], teacher[name]) for name in teacher)
    steps = {float(value) for name, value in states[-1].items() if name.startswith("optimizer") and "step" in name}
    of_the_fake = {float(value) for name, value in states[-1].items() if name.startswith("fake.opt") and "step" in name}
    assert (steps, of_the_fake) == ({2.0}, {4.0})


def test_the_students_turn_leaves_the_fake_alone(straight: Path, tmp_path: Path) -> None:
    """After a first step of both, the fake and its gradient are what they would be had the student had no turn."""
    fakes, gradients = [], []
    for kind in (TurnsStage, FakeAlone):
        loop = begin(tmp_path / kind.__name__, straight, recipe_with(kind))
        loop.trainer.step(0, loop.batches.at(0))
        fakes.append({name: tensor for name, tensor in snapshot(loop).items() if name.startswith("fake.")})
        parameters = loop.trainer.models["fake"].named_parameters()
        gradients.append({name: parameter.grad for name, parameter in parameters if parameter.grad is not None})
    assert not moved(*fakes)
    assert gradients[0]
    assert not moved(*gradients)


def test_a_fake_that_is_the_teacher_does_not_move_the_student(straight: Path, tmp_path: Path) -> None:
    loop = begin(tmp_path / "turns", straight, recipe_with())
    loop.trainer.models["fake"].load_state_dict(loop.trainer.models["teacher"].state_dict())
    record = loop.trainer._turn(loop.trainer.learner, 0, loop.batches.at(0), stop=False)
    assert (record.numbers["loss"], record.numbers["gradient_norm"]) == (0.0, 0.0)
    for parameter in loop.trainer.models["fake"].parameters():
        parameter.data += 0.01
    record = loop.trainer._turn(loop.trainer.learner, 0, loop.batches.at(0), stop=False)
    assert record.numbers["gradient_norm"] > 0


def test_stopped_and_resumed_bit_for_bit(straight: Path, tmp_path: Path) -> None:
    """After a step of both roles, and after one of the fake alone; the end is that of the run that was not stopped."""
    stop = StopRequest(patient=True)
    stop.by = "SIGTERM"
    for _ in range(2):
        assert not begin(tmp_path / "turns", straight, recipe_with()).run(stop)
    resumed = begin(tmp_path / "turns", straight, recipe_with())
    assert resumed.run(StopRequest(patient=True))
    undisturbed = begin(tmp_path / "end", straight, recipe_with())
    checkpoint = straight / "1-turns" / "state" / "step-5"
    position = undisturbed.checkpoints.load(checkpoint, undisturbed.trainer.tensors())
    assert not moved(snapshot(undisturbed), snapshot(resumed))
    assert resumed.trainer.position(5).model_copy(update={"threads": 1}) == position
    assert (position.guard.seen, position.others["fake"].guard.seen) == (3, 5)
    assert position.guard.scale != position.others["fake"].guard.scale
    # The windows of the stopped run end where it was stopped; the lines after the last stop are the same.
    assert lines(tmp_path / "turns")[-1] == lines(straight / "1-turns")[-1]


def test_the_follower_is_the_average_of_the_student(straight: Path, tmp_path: Path) -> None:
    """θ̄_n = ½^n θ_0 + Σ_k ½^(n − k + 1) θ_k over the student's updates, also across a resume."""

    def weights(loop: StageLoop, role: str) -> Tensor:
        return torch.cat(
            [parameter.detach().flatten() for parameter in loop.trainer.models[role].parameters()]
        ).double()

    loop = begin(tmp_path / "turns", straight, recipe_with())
    assert torch.equal(weights(loop, "follower"), weights(loop, "student")), "it starts where the student starts"
    expected, updates = weights(loop, "student"), 0
    for step in range(5):
        if step == 3:
            loop.checkpoints.save(loop.trainer.tensors(), loop.trainer.position(step))
            loop = begin(tmp_path / "turns", straight, recipe_with())
            newest = loop.checkpoints.newest().path
            assert newest is not None
            loop.trainer.restore(loop.checkpoints.load(newest, loop.trainer.tensors()))
        loop.trainer.step(step, loop.batches.at(step))
        if step % 2 == 0:
            expected, updates = (expected + weights(loop, "student")) / 2, updates + 1
    assert updates == 3
    torch.testing.assert_close(weights(loop, "follower"), expected, rtol=0, atol=1e-6)
    assert (weights(loop, "follower") - weights(loop, "student")).abs().max() > 1e-4


def test_power_averages_count_a_roles_own_updates(straight: Path, tmp_path: Path) -> None:
    """The student has its turn in every second step: its averages are those of three updates, not of five."""
    decay = PowerDecay(6.94)

    def student(loop: StageLoop) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in loop.trainer.student.parameters()]).double()

    loop = begin(tmp_path / "turns", straight, recipe_with(Shadowed, averages=[decay]))
    expected = student(loop)
    for step in range(5):
        loop.trainer.step(step, loop.batches.at(step))
        if step % 2 == 0:
            expected = torch.lerp(student(loop), expected, decay.beta(step // 2 + 1))
    names = [name for name, _ in loop.trainer.student.named_parameters()]
    mean, follower = loop.trainer.learner.averages[0].state_dict(), loop.trainer.models["follower"].state_dict()
    for found in (mean, follower):
        together = torch.cat([found[name].flatten() for name in names]).double()
        torch.testing.assert_close(together, expected, rtol=0, atol=1e-6)


def test_another_role_that_is_trained_is_a_model_too(tmp_path: Path) -> None:
    """It is in the stage's folder, and a later stage can start from it."""
    base = recipe_with()
    again = base.stages["turns"].model_copy(update={"teacher": "turns.fake"})
    recipe = Recipe.model_validate(
        {key: getattr(base, key) for key in base.model_fields_set} | {"stages": base.stages | {"again": again}}
    )
    assert needed_stages(recipe, "again") == {"turns"}
    train(recipe, tmp_path / "run")
    fake = Model.load(tmp_path / "run" / "1-turns" / "roles" / "fake")
    assert (fake.card.kind, fake.sampler, fake.card.provenance.stage) == ("diffusion", HeunSampler(), "turns")
    loop = begin(tmp_path / "end", tmp_path / "run", base)
    loop.checkpoints.load(tmp_path / "run" / "1-turns" / "state" / "step-5", loop.trainer.tensors())
    expected = loop.trainer.learners["fake"].averages[0].state_dict()
    found = fake.denoiser.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    folders = stage_folders(recipe, tmp_path / "run")
    earlier: dict[str, Path] = {}
    for name in ("diffusion", "turns"):
        earlier |= models_of_stage(recipe, name, folders[name])
    card = card_of(recipe, "again", (1, 8, 8), Classes(10))
    models = stage_models(recipe, "again", card, Sources(earlier, None))
    student = Model.load(tmp_path / "run" / "1-turns" / "model").denoiser.state_dict()
    for role, source in (("student", student), ("fake", found), ("teacher", found)):
        weights = models[role].denoiser.state_dict()
        assert all(torch.equal(weights[name], source[name]) for name in source)

    config = tmp_path / "run" / "1-turns" / "roles" / "fake" / "config.json"
    whole = config.read_text()
    assert fake.card.provenance.data is not None
    config.write_text(whole.replace(f'"{fake.card.provenance.data}"', "null"))  # as if the hash had come late
    assert Model.load(config.parent).card.provenance.data is None
    train(recipe, tmp_path / "run")
    assert config.read_text() == whole

    lost = again.model_copy(update={"teacher": "turns.critic"})
    with pytest.raises(
        ValueError, match=r"again.teacher='turns.critic' is not an earlier stage; use one of: .* turns.fake"
    ):
        Recipe.model_validate(
            {key: getattr(base, key) for key in base.model_fields_set} | {"stages": base.stages | {"again": lost}}
        )


def test_metrics_average_over_the_turns_that_were_taken(straight: Path, tmp_path: Path) -> None:
    loop = begin(tmp_path / "turns", straight, recipe_with())
    records = [loop.trainer.step(step, loop.batches.at(step)).numbers for step in range(5)]
    assert [record.keys() for record in records[:2]] == [
        {"loss", "part", "gradient_norm", "fake.loss", "fake.part", "fake.gradient_norm"},
        {"fake.loss", "fake.part", "fake.gradient_norm"},
    ]
    first, last = (line for line in lines(straight / "1-turns") if "loss" in line)
    assert first["loss"] == pytest.approx((records[0]["loss"] + records[2]["loss"]) / 2)
    assert first["fake.loss"] == pytest.approx(sum(record["fake.loss"] for record in records[:4]) / 4)
    norms = [record["gradient_norm"] for record in (records[0], records[2])]
    assert (first["gradient_norm"], first["gradient_norm_max"]) == pytest.approx((sum(norms) / 2, max(norms)))
    assert last["loss"] == pytest.approx(records[4]["loss"])


def test_each_role_has_its_own_guard(straight: Path, tmp_path: Path) -> None:
    """The fake's loss is not a number from step 3 on: only its updates are skipped, and the run goes back by them."""
    loop = begin(tmp_path / "turns", straight, recipe_with(IllStage, steps=8, guard={"patience": 3, "retries": 0}))
    position = Position(step=0)
    for step in range(6):
        record = loop.trainer.step(step, loop.batches.at(step))
        if step == 2:
            loop.checkpoints.save(loop.trainer.tensors(), position := loop.trainer.position(3))
    assert (record.verdict, record.reason) == ("go back", "fake: the loss is nan")
    fake = loop.trainer.learners["fake"]
    assert (fake.guard.skipped, loop.trainer.learner.guard.skipped) == (3, 0)
    assert (loop.trainer.skipping, loop.trainer.skipped) == (True, 3)
    assert loop.trainer.learner.guard.seen == 3, "the student had its turn at step 4"
    assert all(isfinite(float(tensor.sum())) for tensor in loop.trainer.tensors().values())
    loop.trainer.go_back(position)
    assert (fake.guard.in_a_row, fake.guard.skipped, loop.trainer.retry) == (0, 3, 1)
    assert not loop.trainer.skipping


def test_in_a_recipe(straight: Path) -> None:
    """The stage is read back from the run's recipe by its import path, its model is sampled, its cost is counted."""
    recipe = recipe_with()
    assert differences(resolve(str(straight / "recipe.toml")), recipe) == []
    assert 'objective = "test_turns:TurnsStage"' in to_toml(recipe)
    assert Model.load(straight / "1-turns" / "model").sample(2).shape == (2, 1, 8, 8)
    memory = estimate(recipe, recipe.stages["turns"]).memory
    weights = 4 * estimate(recipe, recipe.stages["turns"]).parameters
    assert (memory.weights, memory.optimizer, memory.helpers) == (2 * weights, 4 * weights, 2 * weights)


def with_parts(accumulation: int) -> Recipe:
    """The stage of turns twice, the second time with a batch in `accumulation` parts."""
    base = recipe_with(log_every=1, checkpoint_every=5, averages=[ConstantDecay(0.5)])
    parts = base.stages["turns"].model_copy(update={"init": "diffusion", "accumulation": accumulation})
    return Recipe.model_validate(
        {key: getattr(base, key) for key in base.model_fields_set} | {"stages": base.stages | {"parts": parts}}
    )


def command(recipe: Recipe, folder: Path) -> tuple[str, ...]:
    """The command that trains a recipe in a process of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "turns.toml").write_text(to_toml(recipe))
    return ("train", str(folder / "turns.toml"), "--run", str(folder / "run"))


ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process's run of both stages, with whole batches."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(with_parts(1), folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("options", [pytest.param((), id="replicated"), pytest.param(("--shard",), id="sharded")])
def test_two_processes_take_the_same_turns(tmp_path: Path, alone: Path, options: tuple[str, ...]) -> None:
    """With whole batches and with micro-batches: the losses and weights of both roles are the same, up to rounding."""
    words = command(with_parts(2), tmp_path)
    shutil.copytree(alone, tmp_path / "run")
    stages = ("1-turns", "2-parts")
    for stage in stages:
        shutil.rmtree(tmp_path / "run" / stage)
    ended = Launcher(tmp_path).run_ranks(2, *words, *options, environment=ENVIRONMENT)
    assert [code for code, _ in ended] == [0, 0], ended
    for stage in stages:
        for key in ("loss", "gradient_norm", "fake.loss", "fake.gradient_norm"):
            found, expected = losses(tmp_path / "run" / stage, key), losses(alone / stage, key)
            assert len(found) == len(expected) == (5 if key.startswith("fake") else 3)
            assert found == pytest.approx(expected, rel=1e-4), (stage, key)
        for model in ("model", "roles/fake"):
            folders = (tmp_path / "run" / stage / model, alone / stage / model, alone / "0-diffusion" / "model")
            shared, whole, start = (load_file(folder / "model.safetensors") for folder in folders)
            apart, moved = (sum(float((one[n] - whole[n]).norm()) for n in whole) for one in (shared, start))
            assert apart < 1e-3 * moved, (stage, model)


@pytest.mark.long
def test_killed_and_resumed_bit_for_bit(straight: Path, tmp_path: Path) -> None:
    """Two learners, their averages and a follower, killed twice."""
    words = command(recipe_with(), tmp_path)
    stage = tmp_path / "run" / "1-turns"
    for step in (2, 4):
        killed = Launcher(tmp_path).start(*words, environment=ENVIRONMENT)
        killed.until((stage / "state" / f"step-{step}").is_dir)
        killed.send(signal.SIGKILL)
        assert killed.wait() in (-signal.SIGKILL, 0), killed.text
    code, text = Launcher(tmp_path).run(*words, environment=ENVIRONMENT)
    assert code == 0, text
    assert fingerprint(tmp_path / "run") == fingerprint(straight)
    for path in (straight / "1-turns" / "roles").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "run" / path.relative_to(straight)).read_bytes()
