"""What a page is made of, which models it refuses, and where the library that runs them comes from."""

import re
from pathlib import Path

import pytest
from pages import Page
from playgrounds import documented
from vector_condition import VectorKind

import tcm
from tcm.cli.main import app
from tcm.foundation.errors import TcmError
from tcm.report.playground.page import check_playable
from tcm.report.playground.runtime import CODE_FILE, PACKAGE, WASM_FILE, Runtime, fetched_runtime, runtime_in

NETWORK = tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1, attention=())


@pytest.mark.parametrize("name", ["digits", "wide", "colours"])
def test_the_page_holds_everything_and_points_nowhere(pages: Path, name: str) -> None:
    page = Page(pages / f"{name}.html")
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == 1
    assert not {"iframe", "object", "embed", "img"} & set(tags)
    for tag, attributes in page.elements:
        assert not {"src"} & attributes.keys(), tag
        assert attributes.get("href", "data:,") == "data:,"
    assert str(pages) not in page.source
    shown = page.source.partition('<script type="text/plain"')[0]
    assert not re.search(r"https?:|@import|url\(|\{\{", shown)
    script = page.source.rpartition('<script type="module">')[2]
    assert not re.search(r"^(import|export)\b|https?:", script, flags=re.M)


def test_the_digits_take_less_than_6_megabytes(pages: Path) -> None:
    assert (pages / "digits.html").stat().st_size < 6e6


def test_names_are_escaped(pages: Path) -> None:
    """Class names are data for the scripts, and cannot end the element that holds them."""
    source = (pages / "colours.html").read_text()
    assert "<b>red" not in source
    assert '"\\u003cb>red' in source


def test_a_plug_ins_name_is_shown_as_it_is(pages: Path) -> None:
    assert "el:ElStage model · 16 × 32 RGB" in (pages / "wide.html").read_text()


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_documented_commands(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages take seconds to make: the fixture runs one of these commands, the others are parsed."""
    monkeypatch.chdir(tmp_path)
    app([*words, *(["--help"] if words[0] == "playground" else [])], standalone_mode=False)
    assert (tmp_path / "samples.png").exists() == (words[0] == "sample")


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({"kind": "diffusion", "sampler": {"kind": "heun"}}, "sampler=heun: .*; give the model of a consistency"),
        (
            {"condition": VectorKind(2)},
            "condition=vectors of 2 numbers: a page supports only classes.*use `tcm sample`",
        ),
        ({"image_shape": (4, 8, 8)}, "image_shape=.*; give a model of 1 or 3 channels"),
    ],
)
def test_models_that_a_page_cannot_sample(card: dict[str, object], message: str) -> None:
    fields = {"kind": "truncated", "network": NETWORK, "image_shape": (1, 8, 8)} | card
    with pytest.raises(TcmError, match=message):
        check_playable(tcm.ModelCard(**fields))


def test_a_refused_model_fetches_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "cache"))
    card = tcm.ModelCard(kind="diffusion", sampler={"kind": "heun"}, network=NETWORK, image_shape=(1, 8, 8))
    tcm.Model.fresh(card).save(tmp_path / "model")
    with pytest.raises(TcmError, match="sampler=heun"):
        app(["playground", str(tmp_path / "model"), "--out", str(tmp_path / "page.html")], standalone_mode=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_runtime_of_ones_own(tmp_path: Path, runtime: Runtime) -> None:
    with pytest.raises(TcmError, match=f"--runtime={tmp_path} lacks {CODE_FILE} and {WASM_FILE}; give the dist folder"):
        runtime_in(tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / CODE_FILE).write_bytes(runtime.code)
    (tmp_path / "dist" / WASM_FILE).write_bytes(runtime.wasm)
    assert runtime_in(tmp_path) == runtime_in(tmp_path / "dist") == runtime


def test_a_damaged_runtime_is_refused(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    kept = tmp_path / PACKAGE.name.replace("@", "-")
    kept.mkdir()
    (kept / CODE_FILE).write_bytes(runtime.code + b" ")
    (kept / WASM_FILE).write_bytes(runtime.wasm)
    with pytest.raises(TcmError, match=f"{CODE_FILE} has SHA-256 .*; delete it if it exists, and try again"):
        fetched_runtime()


def test_without_npm_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        TcmError, match=r"could not be fetched \(npm is not installed\); get it with `npm pack .*--runtime"
    ):
        fetched_runtime()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_without_the_extra_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcm.foundation.extras.EXTRAS", {"onnx": ("onnx", "no_such_package")})
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    with pytest.raises(TcmError, match=r"a playground needs more packages; run `pip install -e '\.\[onnx\]'`"):
        app(["playground", "digits", "--out", str(tmp_path / "page.html")], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
