"""Whose code is run: not what lies in the working folder, and not what only a file from elsewhere names."""

import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tcm
from tcm.cli import app
from tcm.data import open_dataset
from tcm.foundation.errors import TcmError
from tcm.recipes.resolve import noted_recipe, resolve, to_toml
from tcm.studies.resolve import resolve_study, study_to_toml
from tcm.weights import inspect

ASK = """
import os, sys
from tcm.foundation.errors import TcmError
from tcm.foundation.plugins import entry_point, find_class
exec(os.environ.get("FIRST", ""))
try:
    find_class("kind", os.environ["ASKED"], {}, object, "tcm.asked", trust=True)
    print("found")
except TcmError as error:
    print(error)
"""
MODULE = "class Net: ...\nopen('sprung', 'w').close()\n"
REFUSED = "is in the working folder; if you trust it, put that folder on PYTHONPATH"


def file(path: Path, text: str = MODULE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "mine.zip", "w") as archive:
        archive.writestr("mine.py", MODULE)


def linked(folder: Path) -> None:
    file(folder / "lib" / "mine.py")
    (folder / "mine.py").symlink_to(folder / "lib" / "mine.py")


def installed(folder: Path) -> None:
    """`pip install -e .` of a project whose modules lie at its root: a .pth file, read as Python starts."""
    file(folder / "mine.py")
    file(folder / "site" / "mine.pth", f"{folder}\n")
    file(folder / "lib" / "sitecustomize.py", "import site\nsite.addsitedir('site')\n")


FINDER = """
import sys
from importlib.util import spec_from_file_location
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, {file!r}) if name == "mine" else None
sys.meta_path.append(Finder)
"""


def mapped(folder: Path) -> None:
    """The same as setuptools does it: a finder that knows where the project's modules are."""
    file(folder / "mine.py")
    file(folder / "lib" / "sitecustomize.py", FINDER.format(file=str(folder / "mine.py")))


def declared(folder: Path) -> None:
    """What an installed package looks like, though nobody installed it."""
    file(folder / "lib" / "harmless.py")
    file(folder / "evil-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    file(folder / "evil-1.0.dist-info" / "entry_points.txt", "[tcm.asked]\nevil = harmless:Net\n")


NET = "from tcm.networks import DDPMppConfig\nclass Net(DDPMppConfig): kind: str = '{name}:Net'\n"
M, C, SCRIPT = ["-m", "ask"], ["-c", ASK], ["ask.py"]
Layout = Callable[[Path], None]


def module(*paths: str) -> Layout:
    def layout(folder: Path) -> None:
        for path in paths:
            file(folder / path)

    return layout


@pytest.mark.parametrize(
    ("layout", "start", "path", "first", "asked", "answer"),
    [
        (module("mine.py"), M, None, "", "mine:Net", REFUSED),
        (module("mine.py"), C, None, "", "mine:Net", REFUSED),
        (module("mine/__init__.py"), M, None, "", "mine:Net", REFUSED),
        (module("evil/net.py"), M, None, "", "evil.net:Net", REFUSED),
        (module("evil/net.py"), C, None, "", "evil.net:Net", REFUSED),
        (module("evil/net.py"), M, None, "os.chdir('/')", "evil.net:Net", REFUSED),
        (module("evil/net.py"), C, None, "os.chdir('evil')", "net:Net", REFUSED),
        (module("evil/net.py", "lib/evil/other.py"), M, "lib", "", "evil.net:Net", REFUSED),
        (module("evil/net.py", "lib/evil/other.py"), M, "lib", "import evil", "evil.net:Net", REFUSED),
        (module("mine.py", "lib/mine.py"), M, "lib", "", "mine:Net", REFUSED),
        (linked, M, "lib", "", "mine:Net", REFUSED),
        (module("mine.py"), M, ":/nowhere", "", "mine:Net", REFUSED),
        (module("mine.py"), C, "/nowhere:", "", "mine:Net", REFUSED),
        (module("mine.py"), M, "", "", "mine:Net", REFUSED),
        (declared, M, "lib", "", "evil", "is unknown"),
        (zipped, M, None, "", "mine:Net", "put its module on the Python path"),
        (module("src/mine.py"), M, "src", "", "mine:Net", "found"),
        (module("src/mine.py"), C, "src", "", "mine:Net", "found"),
        (module("evil/net.py"), M, ".", "", "evil.net:Net", "found"),
        (module("mine.py"), M, ".", "", "mine:Net", "found"),
        (module("mine.py"), C, ".", "", "mine:Net", "found"),
        (module("mine.py"), M, ":.", "", "mine:Net", "found"),
        (module("mine.py"), M, None, "sys.path.append(os.getcwd())", "mine:Net", "found"),
        (module("lib/mine.py"), C, None, "sys.path.insert(0, 'lib')", "mine:Net", "found"),
        (module("mine.py"), M, None, "import mine", "mine:Net", "found"),
        (module("mine.py"), SCRIPT, None, "", "mine:Net", "found"),
        (installed, M, "lib", "", "mine:Net", "found"),
        (installed, C, "lib", "", "mine:Net", "found"),
        (mapped, M, "lib", "", "mine:Net", "found"),
        (mapped, C, "lib", "", "mine:Net", "found"),
        (zipped, M, "mine.zip", "", "mine:Net", "found"),
    ],
)  # fmt: skip
def test_whose_folder_a_module_is_in(
    layout: Layout, start: list[str], path: str | None, first: str, asked: str, answer: str, tmp_path: Path
) -> None:
    layout(tmp_path)
    file(tmp_path / "ask.py", ASK)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"FIRST": first, "ASKED": asked} | ({} if path is None else {"PYTHONPATH": path})
    ended = subprocess.run([sys.executable, *start], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer in ended.stdout, ended.stderr
    assert (tmp_path / "sprung").exists() == (answer == "found")


def test_a_strangers_model_runs_nothing(tmp_path: Path) -> None:
    """Its module lies beside it, in a folder that Python takes for a package; the command is the README's."""
    hostile(tmp_path / "evil" / "model", "network", "evil.net:Net")
    file(tmp_path / "evil" / "net.py")
    command = [sys.executable, "-m", "tcm", "sample", "evil/model"]
    environment = os.environ | {"TCM_TRUST": "evil"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"network.kind='evil.net:Net' {REFUSED}" in ended.stderr.replace("\n", " ")
    assert not (tmp_path / "sprung").exists()


def hostile(folder: Path, key: str, kind: str) -> Path:
    """A model folder whose card names a class."""
    if not folder.exists():
        tcm.load("digits").save(folder)
    card = json.loads((folder / "config.json").read_text())
    card[key] = (card[key] if isinstance(card[key], dict) else {}) | {"kind": kind}
    (folder / "config.json").write_text(json.dumps(card))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "model"


WORD = "set TCM_TRUST="
FORM = "is not of the form module:Class"
CLASS = "is not a subclass of"


@pytest.mark.parametrize("key", ["network", "sampler", "condition", "latents", "preconditioning"])
@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("antigravity:x", WORD),
        ("this:s", WORD),
        ("evil:Net", WORD),
        ("evil.net:Net", WORD),
        ("idlelib.idle:Net", WORD),
        ("class:Net", WORD),
        ("tcm.no_such_module:Net", WORD),
        ("os:no_such_class", WORD),
        ("os:system", CLASS),
        ("builtins:eval", CLASS),
        ("builtins:object", CLASS),
        ("subprocess:Popen", CLASS),
        ("pydantic:BaseModel", CLASS),
        ("sys:modules", CLASS),
        ("evil", "is unknown"),
        ("", "is unknown"),
        ("x" * 2**20, "is unknown"),
        (":", FORM),
        (":Net", FORM),
        ("evil:", FORM),
        ("evil:Net:Net", FORM),
        ("evil..net:Net", FORM),
        (".evil:Net", FORM),
        ("evil.:Net", FORM),
        ("../evil:Net", FORM),
        ("/tmp/evil:Net", FORM),
        ("evil/net:Net", FORM),
        ("evil\\net:Net", FORM),
        ("evil\nnet:Net", FORM),
        ("evil\0:Net", FORM),
        ("evil:Net.inner", FORM),
        ("evil:Net()", FORM),
        ("evil:Net [extra]", FORM),
        ("evil net:Net", FORM),
        ("http://evil:80", FORM),
        ("\N{RIGHT-TO-LEFT OVERRIDE}evil:Net", FORM),
        ("a." * 2**16 + "a:Net", FORM),
        ("a" * 2**20 + ":Net", FORM),
        ("evil:" + "a" * 2**20, FORM),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_what_a_card_may_not_name(folder: Path, key: str, kind: str, answer: str) -> None:
    known = set(sys.modules)
    with pytest.raises(TcmError) as caught:
        inspect(hostile(folder, key, kind))
    (folder / "config.json").unlink()
    tcm.load("digits").write_files(folder)
    assert f"{key}.kind=" in str(caught.value)
    assert answer in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert kind.partition(":")[0] not in set(sys.modules) - known


def test_the_users_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an argument, in the environment, or by an import; of the module itself, or of a package that it is in."""
    file(tmp_path / "given" / "net.py", NET.format(name="given.net"))
    monkeypatch.syspath_prepend(tmp_path)
    model = hostile(tmp_path / "model", "network", "given.net:Net")
    for others in ((), "net", "give", "given.nets", "given.net.more", ["other"]):
        with pytest.raises(TcmError, match=r"network.kind='given.net:Net' would run .* set TCM_TRUST=given.net "):
            tcm.load(model, trust=others)
    for word in ("given.net", "given", "other, given", ["other", "given.net"], True):
        assert tcm.load(model, trust=word).card.network.kind == "given.net:Net"
        assert tcm.load(model).card.network.kind == "given.net:Net", "it is imported now"
        del sys.modules["given.net"]
    monkeypatch.setenv("TCM_TRUST", "other, given.net")
    assert tcm.load(model).sample(1).shape == (1, 1, 8, 8)
    del sys.modules["given.net"], sys.modules["given"]


@pytest.mark.parametrize("override", ["data.path=mine_data:Net", "network.kind=mine_data:Net"])
def test_a_runs_recipe_is_not_the_users(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is named at the command line is."""
    file(tmp_path / "mine_data.py", NET.format(name="mine_data"))
    monkeypatch.syspath_prepend(tmp_path)
    file(tmp_path / "recipe.toml", to_toml(resolve("digits", [override])))
    noted_recipe(tmp_path)  # it is imported
    del sys.modules["mine_data"]
    with pytest.raises(TcmError, match=f"{override.partition('=')[0]}='mine_data:Net' would run .*TCM_TRUST=mine_data"):
        noted_recipe(tmp_path)
    resolve(str(tmp_path / "recipe.toml"))
    del sys.modules["mine_data"]


def test_training_a_runs_folder_needs_the_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path / "path" / "my_net.py", NET.format(name="my_net"))
    monkeypatch.syspath_prepend(tmp_path / "path")
    file(tmp_path / "run" / "recipe.toml", to_toml(resolve("digits", ["network.kind=my_net:Net"])))

    def said(*words: str) -> str:
        del sys.modules["my_net"]
        result = CliRunner().invoke(app, ["train", "--dry-run", *words])
        importlib.import_module("my_net")
        return str(result.exception or "trained")

    run = str(tmp_path / "run")
    assert "network.kind='my_net:Net' would run the module my_net" in said(run)
    assert said(run, "network.kind=my_net:Net") == "trained", "what is typed is the user's word"
    assert said(f"{run}/recipe.toml", "--run", f"{run}-2") == "trained"
    monkeypatch.setenv("TCM_TRUST", "my_net")
    assert said(run) == "trained"
    del sys.modules["my_net"]


@pytest.mark.parametrize("override", ["data.path=mine_data:Net", "network.kind=mine_data:Net"])
def test_measuring_a_run_needs_the_word(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe says what its model is compared with."""
    file(tmp_path / "path" / "mine_data.py", NET.format(name="mine_data"))
    monkeypatch.syspath_prepend(tmp_path / "path")
    file(tmp_path / "run" / "recipe.toml", to_toml(resolve("digits", [override])))
    tcm.load("digits").save(tmp_path / "run" / "2-truncated" / "model")
    del sys.modules["mine_data"]
    result = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--detector", "digits", "-n", "4"])
    assert f"{override.partition('=')[0]}='mine_data:Net' would run the module mine_data" in str(result.exception)
    assert "mine_data" not in sys.modules


def test_a_noted_study_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path / "study_data.py", "class Mine: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = study_to_toml(resolve_study("t-prime")).replace('data = "none"', 'data = "study_data:Mine"')
    file(tmp_path / "study.toml", text)
    with pytest.raises(TcmError, match=r"measure.data='study_data:Mine' would run"):
        resolve_study(tmp_path / "study.toml", trust=False)
    assert resolve_study(tmp_path / "study.toml").measure.data == "study_data:Mine"
    del sys.modules["study_data"]


@pytest.mark.skipif(sys.platform == "win32", reason="special files are POSIX's")
def test_a_special_file_named_like_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of what exists is not asked for as a class, so it may not be opened as one."""
    file(tmp_path / "path" / "mine_data.py", NET.format(name="mine_data"))
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.chdir(tmp_path)
    os.mkfifo("mine_data:Net")
    with pytest.raises(TcmError, match="mine_data:Net is a FIFO, not a file"):
        open_dataset("mine_data:Net")
    assert "mine_data" not in sys.modules
