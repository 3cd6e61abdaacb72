"""Must show 6: the stages of the paper and those around them, each with few steps."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from inprocess import ALONE, train
from launching import FOLDERS, STAGES, Launcher, fingerprint, lines, losses, tiny, tiny_recipe
from PIL import Image
from rich.console import Console

import tcm
from tcm.method.conditions import Classes
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import DataSpec, Recipe
from tcm.recipes.stages.consistency import ConsistencyStage
from tcm.recipes.stages.truncated import TruncatedStage
from tcm.training.run import Run, RunOptions
from tcm.training.stage_models import card_of
from tcm.weights.exporting import export_state_dict
from tcm.weights.importing import import_checkpoint


def test_a_finished_run(finished: Path) -> None:
    """recipe.toml, a folder per stage, models that know where they come from, pictures."""
    assert resolve(str(finished / "recipe.toml")) == tiny_recipe()
    for name, folder, (low, high) in zip(STAGES, FOLDERS, ((0.002, 10), (0.002, 10), (1, 10)), strict=True):
        card = tcm.Model.load(finished / folder / "model").card
        assert (card.kind, card.t_min, card.t_max, card.condition) == (name, low, high, Classes(10))
        assert (card.provenance.recipe, card.provenance.stage, card.provenance.step) == ("digits", name, 12)
        assert card.provenance.data == tcm.data.open_dataset("digits").content_hash()
        pictures = sorted((finished / folder / "samples").iterdir())
        expected = ["step-0000012.png"] if name == "diffusion" else ["step-0000006.png", "step-0000012.png"]
        assert [picture.name for picture in pictures] == expected
        assert Image.open(pictures[-1]).size == (8 * 9 * 4 - 4, 8 * 9 * 4 - 4)


def test_a_card_says_whether_the_null_condition_was_learnt() -> None:
    recipe = resolve("digits", ["diffusion.label_dropout=0.1", "truncated.label_dropout=0.1"])
    cards = [card_of(recipe, name, (1, 8, 8), Classes(10)) for name in STAGES]
    assert [card.labels for card in cards] == [range(-1, 10), range(10), range(-1, 10)]
    assert not card_of(recipe, "truncated", (1, 8, 8), None).labels


def test_the_digits_recipe(launcher: Launcher, tmp_path: Path) -> None:
    """`tcm train digits` as shipped but for its length: it learns."""
    words = [f"{stage}.{word}" for stage in STAGES for word in ("log_every=4", "sample_every=60", "batch=32")]
    words += ["diffusion.steps=60", "consistency.steps=20", "truncated.steps=20", "diffusion.warmup=5"]
    code, text = launcher.run("train", "digits", *words, "--run", str(tmp_path / "run"))
    assert code == 0, text
    assert text.splitlines()[-1] == f"done: {tmp_path}/run; see it with `tcm report {tmp_path}/run`"
    course = losses(tmp_path / "run" / FOLDERS[0])
    assert sum(course[-5:]) / 5 < 0.85 * course[0]
    assert tcm.Model.load(tmp_path / "run" / FOLDERS[2] / "model").sample(2, steps=2).shape == (2, 1, 8, 8)


GENERAL = """
extends = "digits"
order = ["diffusion", "consistency", "intermediate", "truncated", "third"]
second_time = 4.0

[stages.intermediate]
objective = "consistency"
init = "consistency"
t_high = 1.0
learning_rate = 1e-3
times = { kind = "lognormal", mean = -1.1, std = 2.0 }
steps = 2
batch = 16

[stages.truncated]
init = "consistency"
frozen = "intermediate"
teacher = "none"

[stages.third]
objective = "truncated"
teacher = "diffusion"
t_prime = 4.0
learning_rate = 1e-3
curriculum = { limit = 0.9 }
steps = 2
batch = 16
"""


def test_general_stages(tmp_path: Path) -> None:
    """An intermediate stage on [t_min, t'] that gives the frozen model; stage 2 from data; a third stage by teacher."""
    (tmp_path / "general.toml").write_text(GENERAL)
    recipe = resolve(str(tmp_path / "general.toml"), tiny(2))
    train(recipe, tmp_path / "run")
    folders = ["0-diffusion", "1-consistency", "2-intermediate", "3-truncated", "4-third"]
    cards = [tcm.Model.load(tmp_path / "run" / folder / "model").card for folder in folders]
    assert [(card.t_min, card.t_max) for card in cards] == [(0.002, 10), (0.002, 10), (0.002, 1), (1, 10), (4, 10)]
    assert list((tmp_path / "run" / "2-intermediate" / "samples").iterdir()) == [], "it knows nothing of pure noise"
    for folder in folders[3:]:
        (line,) = [line for line in lines(tmp_path / "run" / folder) if "loss" in line]
        assert line["boundary"] > 0


@pytest.mark.parametrize("teacher", ["none", "./teacher"])
def test_stage_2_alone(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: str) -> None:
    """The model given with --init is student and frozen network; from data, and from a teacher in a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "teacher").symlink_to(finished / FOLDERS[0] / "model")
    recipe = tiny_recipe(1, 'order=["truncated"]', f"truncated.teacher={teacher}", "truncated.learning_rate=1e-12")
    init = finished / FOLDERS[1] / "model"
    train(recipe, tmp_path / "run", RunOptions(str(init)))
    trained = tcm.Model.load(tmp_path / "run" / "1-truncated" / "model").denoiser.state_dict()
    given = tcm.Model.load(init).denoiser.state_dict()
    assert trained.keys() == given.keys()
    for name in given:
        torch.testing.assert_close(trained[name], given[name], atol=1e-9, rtol=0)


def test_from_an_imported_model(finished: Path, tmp_path: Path) -> None:
    """A published file becomes a model folder; stages 1 and 2 continue from it, with its own images."""
    card = tcm.Model.load(finished / FOLDERS[0] / "model").card
    network = card.network.model_copy(update={"dropout": 0.0})
    source = tcm.Model.fresh(
        card.model_copy(
            update={
                "network": network,
                "image_shape": (3, 8, 8),
                "condition": None,
                "t_max": 80.0,
                "sigma_data": 0.5,
            }
        )
    )
    export_state_dict(source, tmp_path / "published.safetensors")
    import_checkpoint(tmp_path / "published.safetensors", "diffusion").model.save(tmp_path / "imported")
    (tmp_path / "images").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    recipe = Recipe(
        name="imported",
        data=DataSpec(path=str(tmp_path / "images"), flip=True),
        network=network,
        stages={
            "consistency": ConsistencyStage(steps=2, batch=8, learning_rate=1e-4),
            "truncated": TruncatedStage(steps=2, batch=8, learning_rate=1e-4),
        },
    )
    train(recipe, tmp_path / "run", RunOptions(str(tmp_path / "imported")))
    assert tcm.Model.load(tmp_path / "run" / "2-truncated" / "model").sample(2).shape == (2, 3, 8, 8)


class Noting(StringIO):
    """Takes what is printed, and notes whether torch then uses deterministic kernels alone."""

    found: bool | None = None

    def write(self, text: str) -> int:
        if "samples in" in text:
            self.found = torch.are_deterministic_algorithms_enabled()
        return super().write(text)


def test_deterministic_kernels(tmp_path: Path) -> None:
    """All stages have them, on the CPU at least, where they are those that it uses anyway."""
    for deterministic in (False, True):
        said = Noting()
        options = RunOptions(deterministic=deterministic)
        run = Run(tiny_recipe(2), tmp_path / str(deterministic), ALONE, Console(file=said, width=200), options)
        run.train()
        assert said.found is deterministic
        assert not torch.are_deterministic_algorithms_enabled()
    assert fingerprint(tmp_path / "True") == fingerprint(tmp_path / "False")


def test_workers_change_nothing(tmp_path: Path) -> None:
    """Reading processes, and a run that is stopped among them."""
    (tmp_path / "images").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    ends = []
    for workers in (0, 2):
        words = [f"data.path={tmp_path}/images", "classes=none", "conditional=false", 'order=["diffusion"]']
        recipe = tiny_recipe(4, *words, f"data.workers={workers}", "diffusion.sample_every=0")
        train(recipe, tmp_path / f"run-{workers}")
        ends.append(tcm.Model.load(tmp_path / f"run-{workers}" / FOLDERS[0] / "model").denoiser.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
