"""`tcm recipes` as a user calls it."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from count_recipes import count
from typer.testing import CliRunner

from tcm.cli import app
from tcm.recipes.resolve import resolve, shipped


def test_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["recipes"])
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    firsts = [row[0] for row in rows if row and row[0] in shipped()]
    assert sorted(firsts) == shipped()
    assert firsts[0] == "digits"
    for text in (
        "55.7 M",
        "1119.3 M",
        "3×64×64",
        "consistency 512×250K",
        "truncated 1024×200K",
        "estimate",
        "predicted",
    ):
        assert text in result.output
    assert "…" not in result.output


def test_list_as_json() -> None:
    result = CliRunner().invoke(app, ["recipes", "--json"])
    assert result.exit_code == 0
    found = {recipe["name"]: recipe for recipe in json.loads(result.stdout)}
    assert sorted(found) == shipped()
    assert found["cifar10"]["stages"]["truncated"]["parameters"] == 55_732_739
    assert found["cifar10"]["stages"]["truncated"]["batch"] == resolve("cifar10").stages["truncated"].batch


def test_what_is_listed_was_counted_on_these_recipes() -> None:
    listed = json.loads((resources.files("tcm.recipes") / "counted.json").read_text("utf-8"))
    assert count() == listed, "run `python tools/count_recipes.py`"


def test_show(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["recipes", "show", "cifar10", "truncated.t_prime=0.5", "seed=3"])
    assert result.exit_code == 0
    file = tmp_path / "shown.toml"
    file.write_text(result.output, "utf-8")
    assert resolve(str(file)) == resolve("cifar10", ["truncated.t_prime=0.5", "seed=3"])


def test_error_is_one_line() -> None:
    command = [
        sys.executable,
        "-c",
        "from tcm.cli import main; main()",
        "recipes",
        "show",
        "digits",
        "truncated.t_prim=1",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: digits: truncated.t_prim is not a known key; did you mean 't_prime'?\n"
