"""The `tcm` command as a user meets it: real processes."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tcm.cli.doctor import findings
from tcm.cli.main import main
from tcm.foundation.extras import EXTRAS

TCM = Path(sys.executable).parent / "tcm"


def run(*arguments: str, folder_first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, with a folder put before all others on Python's path."""
    paths = [str(folder_first)] if folder_first else []
    paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run([TCM, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("doctor", "--version", "--debug"):
        assert word in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"tcm {version('truncated-consistency')}\n")


def test_doctor_says_what_is_there_and_how_to_get_the_rest() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    for name, finding in findings():
        assert name in done.stdout
        assert finding.split(";")[0][:40] in done.stdout
    for extra in EXTRAS:
        assert f"extra {extra}" in done.stdout


def test_doctor_as_json() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == dict(findings()).keys()


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {
        name: [requirement.partition(">")[0] for requirement in some]
        for name, some in project["optional-dependencies"].items()
        if name != "dev"
    }
    assert {name: list(packages) for name, packages in EXTRAS.items()} == wanted


def test_help_shows_flags_without_a_type_and_explains_its_words() -> None:
    for command, words in {
        "train": ["--deterministic", "--help"],
        "data prepare": ["--skip-broken", "Dhariwal and Nichol"],
        "eval": ["--json", "denoised in one step"],
        "sample": ["two evaluations of the network per step"],
        "import": ["the lowest time at which it is defined"],
    }.items():
        done = run(*command.split(), "--help")
        text = " ".join(done.stdout.replace("│", " ").split())
        for word in words:
            assert word in text, (command, text)
        assert "<bool>" not in text


def test_findings_cover_what_matters() -> None:
    rows = dict(findings())
    assert {"python", "torch", "devices", "bfloat16", "threads"} <= rows.keys()
    assert rows["torch"].endswith("computes")
    assert "too coarse for consistency stages" in rows["bfloat16"]
    for name, packages in EXTRAS.items():
        assert all(package in rows[f"extra {name}"] for package in packages) or "pip install" in rows[f"extra {name}"]


@pytest.fixture
def broken_torchvision(tmp_path: Path) -> Path:
    """A torchvision that fails as the one beside another build of torch does."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    return tmp_path


def test_an_error_that_the_user_can_mend_is_one_line(broken_torchvision: Path) -> None:
    done = run("doctor", folder_first=broken_torchvision)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: the installed torchvision does not work with this torch; run `pip uninstall torchvision`"
    ]


def test_debug_shows_the_traceback(broken_torchvision: Path) -> None:
    done = run("--debug", "doctor", folder_first=broken_torchvision)
    assert done.returncode != 0
    assert "Traceback (most recent call last)" in done.stderr
    assert "TcmError: the installed torchvision" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc and /sys")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sample", "digits", "--out", "/proc/foo.png"], "/proc/foo.png cannot be written"),
        (["sample", "digits", "--out", "/proc/foo"], "/proc/foo cannot be written"),
        (["sample", "digits", "--out", "/sys"], "/sys/000000.png cannot be written"),
        (["playground", "digits", "--out", "/proc/foo.html"], "/proc/foo.html cannot be written"),
        (["export", "digits", "--to", "onnx", "--out", "/proc/foo"], "/proc/foo cannot be written"),
        (["data", "prepare", "digits", "/proc/foo"], "/proc/foo cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written_to(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tcm", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said} (")
    assert "name a place that can be written to" in line


def test_an_error_of_a_file_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of any file that a command writes itself, or of a disk; other errors keep their traceback."""
    monkeypatch.setattr(sys, "argv", ["tcm"])
    for error, said in (
        (PermissionError(13, "Permission denied", "a.txt"), "error: a.txt: Permission denied; correct the path"),
        (OSError(28, "No space left on device"), "error: the disk has no room left (No space left on device); free"),
    ):
        monkeypatch.setattr(sys.modules[main.__module__], "app", lambda error=error: (_ for _ in ()).throw(error))
        with pytest.raises(SystemExit, match="2"):
            main()
        assert capsys.readouterr().err.startswith(said)
    monkeypatch.setattr(
        sys.modules[main.__module__], "app", lambda: (_ for _ in ()).throw(BrokenPipeError(32, "Broken pipe"))
    )
    with pytest.raises(BrokenPipeError):
        main()


def test_wrong_usage_exits_with_2_and_no_traceback() -> None:
    done = run("docter")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "docter" in done.stderr
