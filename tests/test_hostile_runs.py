"""What strangers can put into a run's folder is refused, or left out, in one line."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from launching import tiny_recipe
from typer.testing import CliRunner

import tcm
from tcm.cli import app
from tcm.data import open_stream
from tcm.foundation.errors import TcmError
from tcm.recipes.resolve import noted_recipe, to_toml
from tcm.training.metrics import read_metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="special files and alarms are POSIX's")

DRY = ("train", "--dry-run")


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """What waits for a FIFO would wait for ever."""

    def hang(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose last stage is done."""
    folder = tmp_path / "run"
    tcm.load("digits").save(folder / "2-truncated" / "model")
    (folder / "recipe.toml").write_text(to_toml(tiny_recipe()))
    return folder


def said(*words: str | Path) -> str:
    """The error of a command."""
    error = CliRunner().invoke(app, [str(word) for word in words]).exception
    assert isinstance(error, TcmError), repr(error)
    return str(error)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("data.txt", DRY),
        ("data-files.txt", DRY),
        ("init.txt", DRY),
        ("2-truncated/decided.json", DRY),
        ("scores.jsonl", ("eval", "--detector", "digits", "-n", "4")),
    ],
)
def test_a_fifo_in_a_run(run: Path, file: str, command: tuple[str, ...]) -> None:
    os.mkfifo(run / file)
    assert f"{run / file} is a FIFO, not a file" in said(*command, run)


def test_a_recipe_that_never_ends(run: Path) -> None:
    (run / "base.toml").symlink_to("/dev/zero")
    (run / "recipe.toml").write_text('extends = "base.toml"\n')
    with pytest.raises(TcmError, match=r"base.toml is a device, not a file"):
        noted_recipe(run)


@pytest.mark.parametrize(
    "text",
    [f"x = {'[' * 10_000}", f"x = {'{a=' * 90}1{'}' * 90}", f"{'.'.join('a' * 5000)} = 1", f"x = {'9' * 9999}"],
    ids=["arrays", "tables", "dots", "digits"],
)
def test_a_recipe_too_deep_or_long(run: Path, text: str) -> None:
    (run / "recipe.toml").write_text(text)
    with pytest.raises(TcmError, match=r"recipe.toml (is not valid TOML|has tables within tables).*; correct it there"):
        noted_recipe(run)


@pytest.mark.parametrize("text", ["[]", '{"data": "x"}', '{"data": "x", "budget": "1h", "z": 1}', "[" * 100_000])
def test_a_request_that_is_none(run: Path, text: str) -> None:
    (run / "data.zip").touch()
    (run / "planned.json").write_text(text)
    assert "does not say what the run was planned for" in said(*DRY, run)


@pytest.mark.parametrize("line", ["[]", "5", "[" * 100_000])
def test_lines_that_are_no_records(run: Path, line: str) -> None:
    (run / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    assert read_metrics(run / "metrics.jsonl") == [{"step": 1}]


def test_where_stages_are_is_not_said(run: Path) -> None:
    (run / "elsewhere.json").write_text("[" * 100_000)
    assert "does not say where the run's stages are" in said("sample", run)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a{0..999999999}.tar", "more than 300,000 shards"),
        ("{a,b}" * 19, "more than 300,000 shards"),
        ("a{.tar", "is no name of shards"),
        ("pipe:touch sprung; echo ://", "would run a command"),
        (" Pipe:touch sprung; echo ://", "would run a command"),
    ],
)
def test_names_of_shards(name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TcmError, match=reason):
        open_stream(name)
    assert not (tmp_path / "sprung").exists()
