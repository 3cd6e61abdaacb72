"""Which libraries a command imports: those that it needs, and none of those that take a second for nothing."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer

import tcm
from tcm.cli import app
from tcm.cli.data import CropName
from tcm.cli.weights import TrainedAs
from tcm.data.prepare import Crop
from tcm.evaluation.evaluate import METRICS
from tcm.recipes.stages import STAGES

LIBRARIES = "torch", "numpy", "scipy", "matplotlib", "PIL", "safetensors", "huggingface_hub", "filelock"
SLOW_PARTS = (
    *("scipy.stats", "matplotlib", "huggingface_hub", "sympy", "torch._dynamo"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"),
    *("tcm.report", "tcm.training.run"),
)

CHILD = """
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from tcm.cli import main

forbidden, *commands = (line.split() for line in sys.argv[1].splitlines())
for words in commands:
    sys.argv = ["tcm", *words]
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    found = [name for name in forbidden if name in sys.modules]
    print(code, *words, *([":", *found] if found else []))
"""


def imported_by(commands: list[str], forbidden: tuple[str, ...], folder: Path) -> list[str]:
    """Run commands one after another in one process: each with its exit code, and after a colon what it imported."""
    script = "\n".join([" ".join(forbidden), *commands])
    done = subprocess.run([sys.executable, "-c", CHILD, script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def names_of_all(group: typer.core.TyperGroup, before: str = "") -> list[str]:
    """Every command and group: `train`, `data`, `data fetch`, …."""
    found = []
    for name, command in group.commands.items():
        found.append(before + name)
        if isinstance(command, typer.core.TyperGroup):
            found += names_of_all(command, f"{before}{name} ")
    return found


def test_help_recipes_and_wrong_options_import_no_library(tmp_path: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    names = names_of_all(group)
    assert {"train", "data prepare", "recipes show"} <= set(names)
    fine = ["--version", "--help", "recipes", *(f"{name} --help" for name in names)]
    wrong = ["--nope", "trian", *(f"{name} --nope" for name in names)]
    expected = [f"0 {words}" for words in fine] + [f"2 {words}" for words in wrong]
    assert imported_by(fine + wrong, LIBRARIES, tmp_path) == expected


def test_the_version_needs_no_rich(tmp_path: Path) -> None:
    assert imported_by(["--version"], ("rich", *LIBRARIES), tmp_path) == ["0 --version"]


def test_a_command_imports_what_it_needs(tmp_path: Path) -> None:
    """Also one that refuses a recipe."""
    commands = {"sample digits -n 2": 0, "data info digits": 0, "doctor": 0, "recipes show digitz": 2}
    assert imported_by(list(commands), SLOW_PARTS, tmp_path) == [f"{code} {words}" for words, code in commands.items()]


def test_every_name_of_the_package_loads() -> None:
    api = importlib.import_module("tcm.api")
    assert sorted(tcm.__all__) == sorted(api.__all__)
    for name in tcm.__all__:
        assert getattr(tcm, name) is vars(api)[name]
    assert dir(tcm) == sorted(tcm.__all__)
    with pytest.raises(AttributeError, match="module 'tcm' has no attribute 'Modle'"):
        _ = tcm.Modle


def test_the_words_of_the_options_are_those_of_the_library() -> None:
    """They are written out in the command line, which does not import the library to know them."""
    assert set(get_args(CropName)) == set(Crop)
    assert get_args(TrainedAs) == tuple(STAGES)
    options = typer.main.get_command(app).commands["eval"].params
    (metrics,) = [option for option in options if option.name == "metrics"]
    assert metrics.help == f"Any of {', '.join(METRICS)}, separated by commas; may be repeated. [fid]"


def test_threads_that_wait_give_up_their_core(tmp_path: Path) -> None:
    """OpenMP reads this when torch is loaded, so it must be set before; what a user has set stays."""
    code = f"{CHILD}\nimport os; print(os.environ.get('GOMP_SPINCOUNT'))"
    plain = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    for given, expected in (({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        done = subprocess.run(
            [sys.executable, "-c", code, "torch\n--version"], env=plain | given, capture_output=True, text=True
        )
        assert done.stdout.splitlines() == ["0 --version", expected]
