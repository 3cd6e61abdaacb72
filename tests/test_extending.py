"""The examples of docs/extending.md as they stand: saved as files of their own, trained, sampled and reported."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launching import Launcher

from tcm.foundation.errors import TcmError
from tcm.recipes.resolve import differences, resolve, to_toml

pytestmark = pytest.mark.long

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"```(?:python|toml)\n(# (\S+\.(?:py|toml))\b.*?)```", PAGE.read_text(), flags=re.S)
"""The text of each example, and the file's name that its first line gives it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, as its reader would save them."""
    folder = tmp_path_factory.mktemp("extending")
    for text, name in BLOCKS:
        (folder / name).write_text(text)
    return folder


def tcm(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real command, with `path` (the folder itself by default) on the Python path."""
    command = [sys.executable, "-P", "-m", "tcm", *words]  # -P: what is in the working folder is not on the path
    found = os.pathsep.join(filter(None, [str(path or folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": found}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def shortened(*stages: str) -> Iterator[str]:
    for stage in stages:
        yield from (f"{stage}.{word}" for word in ("steps=4", "batch=16", "sample_every=0"))
    yield "diffusion.warmup=0"


def test_the_page_names_its_files() -> None:
    assert sorted(name for _, name in BLOCKS) == ["one_segment.py", "segments.toml", "tiny.toml", "tiny_network.py"]


@pytest.mark.parametrize(
    ("recipe", "stages", "kind", "described"),
    [
        (
            "segments",
            ("diffusion", "consistency", "segment"),
            "one_segment:OneSegmentStage",
            "one segment above t = 1.5",
        ),
        ("tiny", ("diffusion", "consistency", "truncated"), "truncated", "above t′ = 1"),
    ],
)
def test_train_sample_report(
    folder: Path, tmp_path: Path, recipe: str, stages: tuple[str, ...], kind: str, described: str
) -> None:
    def tcm(*words: str) -> None:
        # What the recipe that is trained names is the user's word; what a run's or a model's folder names is not.
        word = {} if words[0] == "train" else {"TCM_TRUST": "one_segment,tiny_network"}
        code, text = Launcher(tmp_path, inside=folder).run(*words, environment={"PYTHONPATH": str(folder)} | word)
        assert code == 0, text

    tcm("train", f"{recipe}.toml", *shortened(*stages))
    run = folder / "runs" / recipe
    model = run / f"2-{stages[-1]}" / "model"
    card = json.loads((model / "config.json").read_text())
    assert card["kind"] == kind
    assert card["network"]["kind"] == ("tiny_network:TinyConfig" if recipe == "tiny" else "ddpmpp")
    records = [json.loads(line) for line in (run / f"2-{stages[-1]}" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 4
    assert np.isfinite(records[-1]["loss"])

    out = folder / f"{recipe}.npz"
    tcm("sample", str(model), "-n", "3", "--steps", "2", "--class", "7", "--out", str(out))
    images = np.load(out)["images"]
    assert images.shape[0] == 3
    assert images.std() > 0

    tcm("report", str(run))
    page = (run / "report.html").read_text()
    assert described in page
    assert all(stage in page for stage in stages)


@pytest.fixture
def _on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.chdir(folder)
    yield
    forget()


def forget() -> None:
    """Let the next test import the page's modules from where it has them."""
    for _, name in BLOCKS:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.usefixtures("_on_the_path")
@pytest.mark.parametrize("recipe", ["segments.toml", "tiny.toml"])
def test_a_runs_own_recipe_finds_the_class_again(recipe: str, tmp_path: Path) -> None:
    resolved = resolve(recipe)
    (tmp_path / "recipe.toml").write_text(to_toml(resolved))
    again = resolve(str(tmp_path / "recipe.toml"))
    assert again == resolved
    assert [type(stage) for stage in again.stages.values()] == [type(stage) for stage in resolved.stages.values()]
    assert differences(again, resolved) == []


@pytest.mark.usefixtures("_on_the_path")
@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        (
            "segments.toml",
            "segment.objective=nowhere:Stage",
            "segment.objective='nowhere:Stage' cannot be imported (No module named 'nowhere'); put its module on the "
            "Python path",
        ),
        (
            "segments.toml",
            "segment.objective=one_segment:TwoSegments",
            "segment.objective='one_segment:TwoSegments' cannot be imported (module 'one_segment' has no attribute "
            "'TwoSegments'); correct its module, or the name",
        ),
        (
            "segments.toml",
            "segment.objective=:Stage",
            "segment.objective=':Stage' is not of the form module:Class; correct it",
        ),
        (
            "segments.toml",
            "segment.objective=one_segment:OneSegment",
            "segment.objective='one_segment:OneSegment' is not a subclass of Stage; name one that is",
        ),
        (
            "segments.toml",
            "segment.objective=one_segment:draw",
            "segment.objective='one_segment:draw' is not a subclass of Stage; name one that is",
        ),
        (
            "segments.toml",
            "segment.objective=truncate",
            "segment.objective='truncate' is unknown; did you mean 'truncated'? (name your own class as module:Class)",
        ),
        ("segments.toml", "segment.edgy=1.5", "segment.edgy is not a known key; did you mean 'edge'?"),
        ("segments.toml", "segment.edge=high", "segment.edge='high' must be a valid number"),
        (
            "tiny.toml",
            "network.kind=tiny_network:Tiny",
            "network.kind='tiny_network:Tiny' is not a subclass of NetworkConfig; name one that is",
        ),
        ("tiny.toml", "network.chanels=8", "network.chanels is not a known key; did you mean 'channels'?"),
    ],
)
def test_what_is_wrong_is_named(recipe: str, override: str, message: str) -> None:
    with pytest.raises(TcmError) as caught:
        resolve(recipe, [override])
    assert str(caught.value).startswith(f"{recipe}: {message}")


def test_a_module_in_the_working_folder_is_not_on_the_path(folder: Path, tmp_path: Path) -> None:
    result = tcm(folder, "train", "segments.toml", "--dry-run", path=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "error: segments.toml: segment.objective='one_segment:OneSegmentStage' cannot be imported (No module named "
        "'one_segment'); put its module on the Python path\n"
    )


def test_a_module_beside_a_strangers_recipe_is_not_imported(folder: Path, tmp_path: Path) -> None:
    """`python -m tcm` puts the working folder on Python's path; what lies there is not run all the same."""
    (tmp_path / "trap.py").write_text("open('sprung', 'w').close()\n")
    (tmp_path / "theirs.toml").write_text('extends = "digits"\n[network]\nkind = "trap:Config"\n')
    command = [sys.executable, "-m", "tcm", "train", "theirs.toml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "network.kind='trap:Config' is in the working folder" in ended.stderr.replace("\n", " ")
    assert not (tmp_path / "sprung").exists()


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package declares them that pip has installed: a .dist-info folder beside the modules."""
    about = tmp_path / "segments-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: segments\nVersion: 1.0\n")
    declared = re.search(r'```toml\n\[project\.entry-points\."(.*?)"\]\n(\S+) = "(\S+)"\n```', PAGE.read_text())
    assert declared is not None
    group, name, value = declared.groups()
    (about / "entry_points.txt").write_text(
        f"[{group}]\n{name} = {value}\nbroken = nowhere:Stage\n[tcm.networks]\ntiny = tiny_network:TinyConfig\n"
    )
    for text, file in BLOCKS:
        by_name = text.replace(value, name).replace("tiny_network:TinyConfig", "tiny")
        assert (by_name == text) == file.endswith(".py")
        (tmp_path / file).write_text(by_name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TcmError, match=r"segment.objective='one-segment' is unknown"):
        resolve("segments.toml")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forget()
    recipe = resolve("segments.toml")
    assert recipe.stages["segment"].objective == "one-segment"
    assert recipe.stages["segment"].describe() == "one segment above t = 1.5"
    assert type(resolve("tiny.toml").network).__name__ == "TinyConfig"
    with pytest.raises(
        TcmError, match=r"segment.objective='broken' \(nowhere:Stage\) cannot be imported \(No module named 'nowhere'\)"
    ):
        resolve("segments.toml", ["segment.objective=broken"])
    forget()
