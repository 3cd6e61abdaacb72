"""`tcm train --dry-run`: short, writes nothing, and refuses what training would refuse."""

import shutil
from pathlib import Path

import pytest
from inprocess import train
from launching import FOLDERS, tiny, tiny_recipe
from typer.testing import CliRunner

from tcm.cli import app
from tcm.foundation.errors import TcmError

STAGE_1 = ('order=["consistency"]', "consistency.teacher=none")


def dry_run(*arguments: str, width: int = 80) -> str:
    result = CliRunner().invoke(app, ["train", *arguments, "--dry-run"], env={"COLUMNS": str(width)})
    if result.exception is not None:
        raise result.exception
    return result.output


def files(run: Path) -> list[Path]:
    return sorted(run.rglob("*"))


def test_it_is_short_and_writes_nothing(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    text = dry_run("digits", *tiny(), "--run", run)
    assert len(text.splitlines()) < 15
    rows = [line.split() for line in text.splitlines()]
    assert [row[:6] for row in rows if row and row[0] in FOLDERS] == [
        [folder, "at", "step", "0", "12", "16"] for folder in FOLDERS
    ]
    assert "[stages.truncated]" not in text
    assert "[stages.truncated]" in dry_run("digits", *tiny(), "--run", run, "--full")
    assert "A100-h" in text
    assert not Path(run).exists()


def test_shape_and_classes_come_from_the_data(tmp_path: Path) -> None:
    options = ("--run", str(tmp_path / "run"))
    text = dry_run("digits", *tiny(), "image_shape=none", "classes=none", *options)
    assert text == dry_run("digits", *tiny(), *options)


def test_how_far_a_run_is(tmp_path: Path) -> None:
    """What is done, where a stage resumes, the time that remains, and what a change of the recipe does."""
    run = tmp_path / "run"
    words = ('order=["diffusion", "consistency"]', "diffusion.sample_every=0", "consistency.sample_every=0")
    train(tiny_recipe(4, *words), run)
    shutil.rmtree(run / FOLDERS[1] / "model")
    before = files(run)
    rows = {row[0]: row[1:] for line in dry_run(str(run)).splitlines() if (row := line.split())}
    assert (rows[FOLDERS[0]][-1], rows[FOLDERS[1]][:3]) == ("done", ["at", "step", "4"])
    assert rows[FOLDERS[1]][-2:] == ["0", "s"]
    text = dry_run(str(run), "consistency.steps=8")
    assert "changes: consistency.steps: 4 → 8" in text
    with pytest.raises(TcmError, match="move 1-consistency to another place first"):
        dry_run(str(run), "diffusion.steps=8")
    with pytest.raises(TcmError, match=r"was started with another recipe \(seed: 0 → 1\)"):
        dry_run(str(run), "seed=1")
    assert files(run) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("classes=7",), "data.path=digits has 10 classes, but classes=7"),
        (("data.path=./nowhere",), "nowhere"),
        (STAGE_1, "consistency.init needs the model that the run starts from; give it with --init MODEL"),
        ((*STAGE_1, "--init", "./nowhere"), "./nowhere is not a folder"),
        (("--shard",), "--shard needs several processes"),
        (("--device", "nonsense"), "device=nonsense is not a device"),
    ],
)
def test_what_training_refuses(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(TcmError, match=message):
        dry_run("digits", *tiny(4, *(word for word in words if "=" in word)),
                *(word for word in words if "=" not in word), "--run", str(tmp_path / "run"))  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(TcmError, match="cannot be used as a run's folder"):
        dry_run("digits", *tiny(), "--run", str(tmp_path / "run"))


def test_the_options_of_a_dry_run_need_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "digits", "--full", "--run", str(tmp_path / "run")])
    assert "add --dry-run" in str(result.exception)
