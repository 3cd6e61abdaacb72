"""docs/export.md: its commands and its Python, run as written, one after another; and what they leave."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ConsistencyModelPipeline
from onnx_comparing import largest_difference, largest_level, metadata
from typer.testing import CliRunner

import tcm
from tcm.cli import app

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE.read_text(), flags=re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the page's reader works, with diffusers' copy of the code that it trusts."""
    place = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(place / "cache"))
        yield place


@dataclass(frozen=True)
class Reading:
    """What the page's commands print, and the names that each block of Python leaves."""

    printed: list[str]
    names: list[dict[str, Any]]


@pytest.fixture(scope="module")
def reading(folder: Path) -> Reading:
    """The page from top to bottom."""
    found = Reading([], [])
    for kind, text in BLOCKS:
        if kind == "sh":
            result = CliRunner().invoke(app, shlex.split(text)[1:], catch_exceptions=False)
            assert result.exit_code == 0, result.output
            found.printed.append(result.stdout)
            assert "export" not in text or re.fullmatch(r"writing \S+, and comparing it with torch …\n", result.stderr)
        else:
            found.names.append({})
            exec(text, found.names[-1])
    return found


def test_onnx(reading: Reading, folder: Path) -> None:
    files = ["f.onnx", "one-step.onnx", "two-steps.onnx"]
    assert sorted(path.name for path in (folder / "digits-onnx").iterdir()) == files
    for file, line in zip(files, reading.printed[0].splitlines(), strict=True):
        assert re.fullmatch(rf"digits-onnx/{file}: 0\.2\d MB, largest difference from torch \S+( levels of 255)?", line)
    assert reading.names[0]["images"].shape == (10, 1, 8, 8)
    model = tcm.load("digits")
    for count in (1, 6):
        labels = tcm.Labels(torch.arange(count))
        assert largest_difference(folder / "digits-onnx" / "f.onnx", model, count, labels) < 1e-5
        for steps, file in enumerate(files[1:], 1):
            assert largest_level(folder / "digits-onnx" / file, model, steps, count, labels) <= 1
    about = metadata(folder / "digits-onnx" / "two-steps.onnx")
    assert about["method"] == "truncated"
    assert json.loads(about["times"]) == [80.0, 1.0]
    assert json.loads(about["sigma_data"]) == 0.75
    assert json.loads(about["condition"])["count"] == 10
    assert json.loads(about["labels"]) == list(range(10)), "not −1: it was trained with its classes alone"
    assert about["licence"] == "apache-2.0"
    assert reading.names[0]["about"] == about | {"times": "[80.0]"}
    again = CliRunner().invoke(app, ["export", "digits", "--to", "onnx", "--out", "digits-onnx"])
    assert "exists; name a new folder" in str(again.exception)


def test_diffusers(reading: Reading) -> None:
    assert reading.printed[1].startswith("digits-diffusers: largest difference from torch ")
    folder, memory = (reading.names[index]["pipeline"] for index in (1, 2))
    assert type(folder) is type(memory) is ConsistencyModelPipeline
    assert type(folder.unet) is not type(memory.unet)
    assert reading.names[1]["image"].size == (8, 8)
    assert len(reading.names[2]["images"]) == 2
    pictures = [
        pipeline(class_labels=7, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np")
        for pipeline in (folder, memory)
    ]
    np.testing.assert_allclose(pictures[0].images, pictures[1].images, atol=1e-5)


def test_the_hub(reading: Reading, folder: Path) -> None:
    assert reading.printed[2] == "digits-hub: what would be uploaded to someone/digits\n"
    again = tcm.load(folder / "digits-again")
    assert again.card == tcm.load("digits").card
    assert torch.equal(again.sample(2), reading.names[3]["model"].sample(2))


def test_links() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", PAGE.read_text())
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
