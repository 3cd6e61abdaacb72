"""Must show 5, the trainer's share: what does not fit is said in one line, with the value and the remedy."""

import shutil
from pathlib import Path

import pytest
from failing import failing_recipe
from inprocess import ALONE, train
from launching import Launcher, tiny, tiny_recipe
from PIL import Image

from tcm.cli.planned_run import planned_recipe
from tcm.data import open_dataset
from tcm.data.opening import open_pictures
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import join
from tcm.method.conditions import Classes
from tcm.networks import EDM2Config
from tcm.recipes.schema import Recipe
from tcm.training.run import RunOptions
from tcm.training.stage_models import card_of
from tcm.weights import Model

STAGE_2 = ('order=["truncated"]', "truncated.teacher=none")
STAGE_1 = ('order=["consistency"]', "consistency.teacher=none")


def saved_model(folder: Path, stage: str, recipe: Recipe | None = None, classes: int = 10) -> str:
    """An untrained model of a stage."""
    recipe = recipe or tiny_recipe()
    shape = recipe.image_shape or (1, 8, 8)
    Model.fresh(card_of(recipe, stage, shape, Classes(classes))).save(folder / "model")
    return str(folder / "model")


def refusal(recipe: Recipe, folder: Path, init: str | None = None, **options: object) -> str:
    with pytest.raises(TcmError) as error:
        train(recipe, folder / "run", RunOptions(init, **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_datas_shape(tmp_path: Path) -> None:
    assert refusal(tiny_recipe(4, "image_shape=[1,16,16]"), tmp_path) == (
        "data.path=digits has images of shape [1, 8, 8], but image_shape is [1, 16, 16]; prepare the data with "
        "`tcm data prepare` or change image_shape"
    )


def test_the_datas_classes(tmp_path: Path) -> None:
    assert refusal(tiny_recipe(4, "classes=7"), tmp_path) == (
        "data.path=digits has 10 classes, but classes=7; correct one of them"
    )


def test_data_without_labels(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        Image.new("L", (8, 8), 80 * number).save(images / f"{number}.png")
    recipe = tiny_recipe(4, f"data.path={images}", "classes=none")
    assert refusal(recipe, tmp_path) == (
        f"conditional=true, but data.path={images} has no classes or other annotations; add them or set "
        "conditional=false"
    )


def test_data_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere" in refusal(tiny_recipe(4, "data.path=./nowhere"), tmp_path)


def test_no_init(tmp_path: Path) -> None:
    assert refusal(tiny_recipe(4, *STAGE_1), tmp_path) == (
        "consistency.init needs the model that the run starts from; give it with --init MODEL"
    )
    assert refusal(tiny_recipe(4, *STAGE_2), tmp_path / "other").startswith("truncated.init needs the model")


def test_an_init_that_is_not_there(tmp_path: Path) -> None:
    message = refusal(tiny_recipe(4, *STAGE_1), tmp_path, "./nowhere")
    assert message.startswith("--init: ./nowhere is not a folder; give a model folder")


def test_an_init_of_another_network(tmp_path: Path) -> None:
    wide = saved_model(tmp_path, "diffusion", tiny_recipe(4, "network.channels=16"))
    message = refusal(tiny_recipe(4, *STAGE_1), tmp_path, wide)
    assert message.startswith("consistency.init=previous has network.channels 16, but this recipe needs 8;")


def test_an_init_of_another_kind_of_network(tmp_path: Path) -> None:
    card = card_of(tiny_recipe(), "diffusion", (1, 8, 8), Classes(10))
    other = EDM2Config(channels=16, channel_mult=(1, 2), blocks=1, attention=())
    Model.fresh(card.model_copy(update={"network": other})).save(tmp_path / "model")
    message = refusal(tiny_recipe(4, *STAGE_1), tmp_path, str(tmp_path / "model"))
    assert message.startswith("consistency.init=previous has network.kind edm2, but this recipe needs ddpmpp;")


def test_an_init_of_other_classes(tmp_path: Path) -> None:
    message = refusal(tiny_recipe(4, *STAGE_1), tmp_path, saved_model(tmp_path, "diffusion", classes=3))
    assert (
        message
        == "consistency.init=previous has condition 3 classes, but this recipe needs 10 classes; make them the same"
    )


def test_an_init_of_another_shape(tmp_path: Path) -> None:
    model = saved_model(tmp_path, "diffusion", tiny_recipe(4, "image_shape=[1,16,16]"))
    message = refusal(tiny_recipe(4, *STAGE_1), tmp_path, model)
    assert message.startswith("consistency.init=previous has image_shape (1, 16, 16), but this recipe needs (1, 8, 8)")


def test_dropout_may_differ(tmp_path: Path) -> None:
    model = saved_model(tmp_path, "diffusion", tiny_recipe(2, "network.dropout=0.5"))
    train(tiny_recipe(2, *STAGE_1), tmp_path / "run", RunOptions(model))


def test_a_frozen_model_that_is_not_defined_there(tmp_path: Path) -> None:
    frozen = saved_model(tmp_path, "truncated", tiny_recipe(4, "truncated.t_prime=2.0", "second_time=2.0"))
    message = refusal(tiny_recipe(4, *STAGE_2), tmp_path, frozen)
    assert message == (
        "truncated.frozen=previous must cover times from 0.6848 to 1, but it is defined only from 2 to 10; change "
        "one of the two ranges or name another model"
    )


def test_a_frozen_model_must_be_a_consistency_model(tmp_path: Path) -> None:
    assert refusal(tiny_recipe(4, *STAGE_2), tmp_path, saved_model(tmp_path, "diffusion")) == (
        "truncated.frozen=previous is a diffusion model, but this stage needs a consistency model there; name another"
    )


def test_a_teacher_must_be_a_diffusion_model(tmp_path: Path) -> None:
    recipe = tiny_recipe(4, 'order=["consistency"]', "consistency.teacher=init")
    assert refusal(recipe, tmp_path, saved_model(tmp_path, "consistency")) == (
        "consistency.teacher=init is a consistency model, but this stage needs a diffusion model there; name another"
    )


def test_a_teacher_must_know_all_times(tmp_path: Path) -> None:
    recipe = tiny_recipe(4, 'order=["consistency"]', "consistency.teacher=init", "t_max=20.0")
    assert refusal(recipe, tmp_path, saved_model(tmp_path, "diffusion")) == (
        "consistency.teacher=init must cover times up to 20, but it is defined only from 0.002 to 10; change one of "
        "the two ranges or name another model"
    )


def test_a_later_stage_is_checked_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that stage 2 needs is missing, damaged or does not fit: stage 0 does not begin."""
    monkeypatch.chdir(tmp_path)
    saved_model(tmp_path / "wide", "consistency", tiny_recipe(4, "network.channels=16"))
    saved_model(tmp_path / "other", "consistency")
    saved_model(tmp_path / "cut", "consistency")
    weights = tmp_path / "cut" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    saved_model(tmp_path / "empty", "consistency")
    (tmp_path / "empty" / "model" / "model.safetensors").unlink()
    for override, message in {
        "truncated.teacher=init": "truncated.teacher needs the model that the run starts from",
        "truncated.frozen=./nowhere": "./nowhere is not a folder; give a model folder",
        "truncated.frozen=wide/model": "truncated.frozen=wide/model has network.channels 16, but this recipe needs 8;",
        "truncated.init=wide/model": "truncated.init=wide/model has network.channels 16, but this recipe needs 8;",
        "truncated.teacher=other/model": "truncated.teacher=other/model is a consistency model, but this stage needs",
        "truncated.frozen=cut/model": "cut/model/model.safetensors is damaged",
        "truncated.frozen=empty/model": "empty/model/model.safetensors does not exist;",
    }.items():
        assert refusal(tiny_recipe(4, override), tmp_path).startswith(message)
        assert not (tmp_path / "run").exists(), "nothing is left of it"


def test_a_stage_that_is_done_needs_its_models_no_more(tmp_path: Path) -> None:
    init = saved_model(tmp_path, "diffusion")
    train(tiny_recipe(2, *STAGE_1), tmp_path / "run", RunOptions(init))
    (tmp_path / "model").rename(tmp_path / "moved")
    train(tiny_recipe(2, *STAGE_1), tmp_path / "run")


def test_another_recipe_for_the_same_run(finished: Path) -> None:
    with pytest.raises(TcmError) as error:
        train(tiny_recipe(12, "truncated.t_prime=0.5", "seed=3"), finished)
    assert str(error.value) == (
        f"{finished} was started with another recipe (seed: 0 → 3; truncated.t_prime: 1.0 → 0.5); use the run's own "
        f"recipe or another --run"
    )


def test_another_init_for_the_same_run(tmp_path: Path) -> None:
    first, other = (saved_model(tmp_path / name, "diffusion") for name in ("first", "other"))
    recipe = tiny_recipe(2, *STAGE_1)
    train(recipe, tmp_path / "run", RunOptions(first))
    train(recipe, tmp_path / "run")  # noted, so that it need not be given again
    assert refusal(recipe, tmp_path, other) == (
        f"{tmp_path}/run was started with --init {first}, not {other}; leave out --init or use another --run"
    )


def test_a_run_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    assert refusal(tiny_recipe(), tmp_path).endswith(
        "run cannot be used as a run's folder (File exists); choose another --run"
    )


def test_sharing_alone(tmp_path: Path) -> None:
    assert refusal(tiny_recipe(), tmp_path, sharded=True) == (
        "--shard needs several processes, but there is only one; start them with torchrun"
    )


@pytest.mark.parametrize("name", ["nonsense", "cuda:77", "meta", "cpu:x"])
def test_a_device_that_does_not_exist(name: str) -> None:
    message = rf"device={name} (is not a device|does not exist here).*; use one of cpu"
    with pytest.raises(TcmError, match=message), join(name):
        pass


def test_the_command_line(launcher: Launcher, tmp_path: Path) -> None:
    """One line, exit code 2, and nothing left behind that would hinder a corrected start."""
    run = str(tmp_path / "run")
    code, text = launcher.run("train", "digits", *tiny(2, "classes=7"), "--run", run)
    assert (code, text) == (2, "error: data.path=digits has 10 classes, but classes=7; correct one of them\n")
    code, text = launcher.run("train", "digits", *tiny(2, 'order=["diffusion"]'), "--run", run)
    assert code == 0, text


@pytest.mark.parametrize("part", ["", "0-diffusion", "0-diffusion/samples", "0-diffusion/model", "0-diffusion/state"])
def test_what_a_run_has_written_is_no_data(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a folder that holds a run beside images; what a user puts beside the stages is the user's."""
    run = tmp_path / "run"
    train(tiny_recipe(2, 'order=["diffusion"]'), run)
    with pytest.raises(TcmError, match=r"is part of a run, .*; give a folder that holds only images"):
        open_pictures(run / part)
    with pytest.raises(TcmError, match="is part of a run"):
        open_dataset(tmp_path)
    shutil.copytree(run / "0-diffusion" / "samples", run / "mine")
    assert open_pictures(run / "mine").names
    monkeypatch.chdir(tmp_path)
    if part:
        with pytest.raises(TcmError, match="is part of a run"):
            planned_recipe(f"run/{part}", Path("runs/planned"), "1h", ALONE)
        assert not Path("runs/planned").exists()


@pytest.mark.parametrize("error", ["MemoryError", "OutOfMemoryError"])
def test_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """What the stage needs, and what would make it less."""
    monkeypatch.setenv("FAIL", f"0 {error} training")
    with pytest.raises(TcmError) as caught:
        train(failing_recipe(), tmp_path / "run")
    text = str(caught.value)
    assert text.startswith("out of memory (bad luck); failing needs about ")
    assert text.endswith(
        " for the activations of 16 images at a time; use failing.accumulation=2, a failing.batch below 16, "
        "failing.precision=bf16 or --shard with more than 1 process"
    )


def test_an_error_that_is_not_of_memory_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "0 RuntimeError training")
    with pytest.raises(RuntimeError, match="bad luck"):
        train(failing_recipe(), tmp_path / "run")
