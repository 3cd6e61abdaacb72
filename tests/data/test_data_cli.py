"""The commands, as a user types them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import writers
from PIL import Image, features

from tcm.cli import main
from tcm.data.decode import EXTENSIONS

IMAGES = writers.sample_pixels(12, height=16, width=16)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "fetched"))


@dataclass(frozen=True)
class Done:
    exit_code: int
    stdout: str
    stderr: str


Tcm = Callable[..., Done]


@pytest.fixture
def tcm(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tcm:
    """The entry point of the command, in this process: starting one for each call would take most of the time."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr("sys.argv", ["tcm", "data", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int | None)
        return Done(code or 0, *capfd.readouterr())

    return run


def test_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-c", "from tcm.cli import main; main()", "data", "info", "digits", "--split", "test"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "30"})
    problem = "digits has no splits, so there is no split 'test'; give the path of that part of the data"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {problem}\n")


def test_info(tcm: Tcm, tmp_path: Path) -> None:
    done = tcm("info", "digits")
    assert done.exit_code == 0, done.stderr
    for part in ("1,797", "1 × 8 × 8", "183 (10.2%)", "0.7518"):
        assert part in done.stdout
    with Image.open(tmp_path / "data-samples.png") as picture:
        assert picture.size == (8 * (8 * 9 - 1), 8 * (8 * 9 - 1))


def test_info_of_broken_files(tcm: Tcm, tmp_path: Path) -> None:
    writers.write_files(tmp_path / "d", {**writers.numbered(IMAGES), "00003.png": b"broken [bold]"})
    done = tcm("info", "d")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 00003.png cannot be read")
    assert done.stderr.count("\n") == 1
    assert "BytesIO" not in done.stderr
    assert done.stderr.endswith("; fix or remove it, or leave it out with `tcm data prepare --skip-broken`\n")
    done = tcm("info", "d", "--skip-broken")
    assert done.exit_code == 0, done.stderr
    assert "left out: 00003.png cannot be read" in done.stdout
    assert "--skip-broken" not in done.stdout + done.stderr, "it was passed"


def test_info_as_json(tcm: Tcm, tmp_path: Path) -> None:
    done = tcm("info", "digits", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["count"], found["shape"], found["skipped"]) == (1797, [1, 8, 8], [])
    assert found["class_counts"][3] == {"name": "3", "count": 183}
    assert found["sigma_data"] == pytest.approx(0.7518, abs=1e-4)
    assert (tmp_path / found["samples"]).is_file()


@pytest.mark.parametrize("target", ["out.zip", "out"])
def test_prepare(tcm: Tcm, tmp_path: Path, target: str) -> None:
    writers.write_files(tmp_path / "d", writers.numbered(IMAGES))
    done = tcm("prepare", "d", target, "--size", "8", "--crop", "dhariwal", "--channels", "1", "--workers", "2")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"12 images (cropped (dhariwal), scaled to 8×8, grey): {target}\n"
    done = tcm("info", target)
    assert "1 × 8 × 8" in done.stdout
    done = tcm("prepare", "d", target)
    assert (done.exit_code, done.stderr) == (2, f"error: {target} exists already; remove it or choose another name\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["info", "nowhere.zip"], "there is no file or folder nowhere.zip"),
        (["info", "digits", "--split", "test"], "has no splits"),
        (["info", "cifar10"], "tcm data fetch cifar10"),
        (["fetch", "imagenet"], "choose cifar10, emoji, fashion-mnist, mnist"),
        (["fetch", "mnist", "--out", "."], "is a folder"),
        (["prepare", "digits", "out.zip", "--size", "big"], "write 64, or 48x64"),
        (["prepare", "digits", "out.zip", "--crop", "center"], "pass --size"),
    ],
)
def test_errors_are_one_line(tcm: Tcm, arguments: list[str], problem: str) -> None:
    done = tcm(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert problem in done.stderr


def test_fetch_finds_and_verifies_what_is_there(tcm: Tcm, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mnist.npz",
        images=IMAGES,
        labels=np.zeros(12, int),
        test_images=IMAGES,
        test_labels=np.zeros(12, int),
    )
    done = tcm("fetch", "mnist", "--out", "mnist.npz")
    assert done.exit_code == 2
    assert "delete it and fetch again" in done.stderr


@pytest.mark.filterwarnings("always::tcm.foundation.errors.TcmWarning")
def test_info_of_a_folder_of_any_photographs(tcm: Tcm, tmp_path: Path) -> None:
    """Several sizes and colours, as a phone leaves them; what is no image that can be read is counted by its ending."""
    folder = tmp_path / "d"
    folder.mkdir()
    for number, (mode, size) in enumerate([("RGB", (40, 50)), ("L", (64, 33)), ("RGB", (32, 32))]):
        Image.new(mode, size, 77).save(folder / f"{number}.jfif", "JPEG")
    for name in ("a.heic", "b.HEIC", "c.mov", "notes.txt", ".DS_Store"):
        (folder / name).write_bytes(b"x")
    done = tcm("info", "d", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["shape"] == [3, 32, 32]
    assert done.stderr.count("2 .heic, 1 .mov") == 1
    assert "as `tcm plan` prepares them" in done.stderr
    assert ".txt" not in done.stderr
    assert (".avif" in EXTENSIONS) == features.check("avif")
    assert not {".eps", ".pdf", ".ps", ".svg"} & EXTENSIONS
