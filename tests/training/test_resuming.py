"""A run that resumes with another recipe: harmless changes, moved data, a longer stage and what comes after it."""

import shutil
from pathlib import Path

import pytest
import writers
from inprocess import train
from launching import FOLDERS, STAGES, fingerprint, lines, model_weights, tiny_recipe

import tcm
from tcm.foundation.errors import TcmError
from tcm.recipes.changes import changes
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import Recipe
from tcm.report.records import read_run
from tcm.training.resuming import note, resumption
from tcm.training.run import RunOptions

SPARING = tuple(f"{stage}.{word}" for stage in STAGES[:2] for word in ("sample_every=0", "checkpoint_every=1000"))
ONLY, TWO = ('order=["diffusion"]', *SPARING), ('order=["diffusion", "consistency"]', *SPARING)


def refusal(recipe: Recipe, run: Path, options: RunOptions | None = None) -> str:
    """Why a run does not take a recipe; the folder stays as it is."""
    before = sorted(run.rglob("*"))
    with pytest.raises(TcmError) as error:
        train(recipe, run, options or RunOptions())
    assert sorted(run.rglob("*")) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def same_models(run: Path, other: Path) -> bool:
    """Bit for bit, with their cards."""
    files = [f"{stage}/model/{name}" for stage in FOLDERS[:2] for name in ("model.safetensors", "config.json")]
    return all((run / file).read_bytes() == (other / file).read_bytes() for file in files)


def test_harmless_changes(tmp_path: Path) -> None:
    """They are named in one line, noted, and leave the weights as they are."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    train(tiny_recipe(4, 'order=["diffusion"]', "diffusion.checkpoint_every=2", "diffusion.sample_every=0"), run)
    shutil.copytree(run, straight)
    shutil.rmtree(run / FOLDERS[0] / "model")
    shutil.rmtree(run / FOLDERS[0] / "state" / "step-4")
    harmless = ("diffusion.log_every=1", "diffusion.keep=1", "diffusion.sample_every=4", "diffusion.checkpoint_every=3")
    said = train(tiny_recipe(4, 'order=["diffusion"]', *harmless), run)
    (line,) = [line for line in said.splitlines() if "resuming with changes" in line]
    assert line == (
        "resuming with changes: diffusion.log_every: 2 → 1; diffusion.checkpoint_every: 2 → 3; diffusion.keep: 2 → 1; "
        "diffusion.sample_every: 0 → 4"
    )
    weights = model_weights(straight, FOLDERS[0])
    assert all(tensor.equal(weights[name]) for name, tensor in model_weights(run, FOLDERS[0]).items())
    assert len(list((run / FOLDERS[0] / "state").iterdir())) == 1
    assert "changes" not in train(tiny_recipe(4, 'order=["diffusion"]', *harmless), run)


def test_the_schema_says_what_may_change() -> None:
    """Also for the stages of a plug-in, which inherit it."""
    words = ["accumulation=2", "log_every=3", "sample_every=3", "checkpoint_every=3", "keep=3", "steps=5000"]
    given = resolve("digits", ["data.workers=3", "data.path=x", "data.window=3", *(f"*.{word}" for word in words)])
    found: dict[str | None, set[str]] = {}
    for change in changes(resolve("digits"), given):
        found.setdefault(change.rule, set()).add(change.key.removeprefix("data.").rpartition(".")[2])
    assert found == {
        "free": {"workers", "accumulation", "log_every", "sample_every", "checkpoint_every", "keep"},
        "same content": {"path"},
        "longer": {"steps"},
        None: {"window"},
    }


def test_accumulation_may_change_and_the_batch_may_not(tmp_path: Path) -> None:
    train(tiny_recipe(2, *ONLY), tmp_path / "run")
    assert "diffusion.accumulation: 1 → 2" in train(tiny_recipe(2, *ONLY, "diffusion.accumulation=2"), tmp_path / "run")
    assert "another recipe (diffusion.batch: 16 → 8)" in refusal(
        tiny_recipe(2, *ONLY, "diffusion.batch=8", "diffusion.accumulation=2"), tmp_path / "run"
    )


@pytest.mark.parametrize("known", ["by the run", "by a model", "not at all"])
def test_moved_data(tmp_path: Path, known: str) -> None:
    images = writers.numbered(writers.sample_pixels(40, channels=1, height=8, width=8))
    first = writers.write_files(tmp_path / "first", images)
    words = (*ONLY, "classes=none", "conditional=false")
    run = tmp_path / "run"
    train(tiny_recipe(4, *words, f"data.path={first}"), run)
    first.rename(tmp_path / "second")
    if known != "by the run":
        (run / "data.txt").unlink()
    if known == "not at all":
        shutil.rmtree(run / FOLDERS[0] / "model")
        message = refusal(tiny_recipe(4, *words, f"data.path={tmp_path / 'second'}"), run)
        assert message.startswith(f"{run} has no record of its data")
        return
    said = train(tiny_recipe(4, *words, f"data.path={tmp_path / 'second'}"), run)
    assert f'data.path: "{first}" → "{tmp_path / "second"}" (the same content)' in said
    other = writers.write_files(tmp_path / "other", dict(list(images.items())[1:]))
    message = refusal(tiny_recipe(4, *words, f"data.path={other}"), run)
    assert message.startswith(f"{run} was started with other data (data.path: ")
    assert str(read_run(run).recipe.data.path) == str(tmp_path / "second")


def test_an_extended_stage_is_that_of_a_longer_run(tmp_path: Path) -> None:
    """Bit for bit: weights, averages, optimiser; and the metrics too where the old end is a multiple of log_every."""
    averages = "diffusion.averages=[{kind='power', gamma=6.94}, {kind='constant', decay=0.5}]"
    schedule = ("diffusion.schedule=inverse_sqrt", "diffusion.schedule_reference=3", "diffusion.warmup=5")
    for steps in (10, 20):
        said = train(tiny_recipe(steps, *ONLY, averages, *schedule), tmp_path / "run")
    assert "resuming with changes: diffusion.steps: 10 → 20 (extended)" in said
    train(tiny_recipe(20, *ONLY, averages, *schedule), tmp_path / "straight")
    newest = "0-diffusion/state/step-20"
    found, expected = fingerprint(tmp_path / "run"), fingerprint(tmp_path / "straight")
    names = [name for name in expected if name.startswith((newest, "0-diffusion/model/"))]
    assert any("average.1." in name for name in names)
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    assert lines(tmp_path / "run" / FOLDERS[0]) == lines(tmp_path / "straight" / FOLDERS[0])
    assert tcm.load(tmp_path / "run" / FOLDERS[0] / "model-step-10").card.provenance.step == 10


def test_a_stage_that_has_not_finished_is_extended(tmp_path: Path) -> None:
    train(tiny_recipe(8, *ONLY), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / FOLDERS[0] / "model")
    assert "diffusion.steps: 8 → 10" in train(tiny_recipe(10, *ONLY), tmp_path / "run")
    assert lines(tmp_path / "run" / FOLDERS[0])[-1]["step"] == 10
    assert "diffusion.steps: 10 → 9" in refusal(tiny_recipe(9, *ONLY), tmp_path / "run")


def test_a_stage_without_its_last_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_recipe(8, *ONLY), run)
    shutil.rmtree(run / FOLDERS[0] / "state" / "step-8")
    assert refusal(tiny_recipe(12, *ONLY), run) == (
        f"diffusion cannot be extended: its last checkpoint, {run}/0-diffusion/state/step-8, does not exist any more; "
        f"restore it, or train a new run from its model with --init {run}/0-diffusion/model"
    )


def longer(*overrides: str) -> Recipe:
    return tiny_recipe(4, *TWO, "diffusion.steps=8", *overrides)


def test_later_stages_are_trained_again_once_they_are_out_of_the_way(tmp_path: Path) -> None:
    """As if the run had been this long from the start."""
    run = tmp_path / "run"
    train(tiny_recipe(4, *TWO), run)
    assert refusal(longer(), run) == (
        f"{run}/1-consistency would no longer be trained from the model of diffusion; to train again what depends on "
        "it, move 1-consistency to another place first, or use another --run"
    )
    (run / FOLDERS[1]).rename(tmp_path / "old")
    train(longer("consistency.learning_rate=1e-3"), run)
    train(longer("consistency.learning_rate=1e-3"), tmp_path / "straight")
    assert same_models(run, tmp_path / "straight")


def test_all_later_stages_are_named_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    note(run, tiny_recipe(4, *SPARING), None)
    for folder in FOLDERS:
        (run / folder / "state").mkdir(parents=True)
    with pytest.raises(TcmError, match="move 1-consistency, 2-truncated to another place first"):
        resumption(tiny_recipe(4, *SPARING, "diffusion.steps=8"), run)


def test_an_extension_that_was_cut_short(tmp_path: Path) -> None:
    """Between the moves and the note: the same command does the rest, and so does the run's own recipe."""
    run = tmp_path / "run"
    train(tiny_recipe(4, *TWO), run)
    train(longer(), tmp_path / "straight")
    shutil.rmtree(run / FOLDERS[1])
    (run / FOLDERS[0] / "model").rename(run / FOLDERS[0] / "model-step-4")
    shutil.copytree(run, tmp_path / "copy")
    train(longer(), run)
    assert same_models(run, tmp_path / "straight")
    train(tiny_recipe(4, *TWO), tmp_path / "copy")
    assert (tmp_path / "copy" / FOLDERS[0] / "model").is_dir()
