"""Runs that an earlier version had begun end as they did with that version; so do the models of the package.

`witness/record.py` made them. Bits are compared where this CPU's elementary operations agree with the recorded ones to
the bit; elsewhere rounding differs, and what it may amount to was measured between AVX-512 and SSE4.1.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from finish import RECORDED, finish
from once import once
from safetensors.torch import load_file
from torch import Tensor

WITNESS = Path(__file__).parent / "witness"
ARCHIVES = sorted(WITNESS.glob("*.tar.xz"))
ROUNDING = {"tangents-2": 5e-3}
"""Relative to a model's weights; ten times what was measured. Of all others 1e-5."""


def make(folder: Path) -> None:
    for archive in ARCHIVES:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    finish(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return load_file(once(tmp_path_factory, "witness", make) / RECORDED.name)


def agree(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether tensors are those that were recorded, under the same names."""
    recorded = load_file(RECORDED)
    if torch.equal(ours["arithmetic"], recorded["arithmetic"]):
        return all(torch.equal(ours[key], value) for key, value in theirs.items())
    joined = torch.cat([value.flatten() for value in theirs.values()])
    difference = torch.cat([ours[key].flatten() for key in theirs]) - joined
    return float(difference.norm() / joined.norm()) <= ROUNDING.get(name, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", [archive.name.partition(".")[0] for archive in ARCHIVES])
def test_a_run_that_was_cut_off_ends_as_it_did(name: str, results: dict[str, Tensor]) -> None:
    recipe, stage = name.split("-")
    expected = {
        key.replace(recipe, name, 1): value
        for key, value in load_file(RECORDED).items()
        if key.startswith(f"{recipe}/") and key.split("/")[1] >= stage
    }
    assert expected
    assert agree(name, results, expected)


@pytest.mark.parametrize("name", ["digits", "fashion-mnist", "cifar10-16"])
def test_the_models_of_the_package_draw_what_they_drew(name: str, results: dict[str, Tensor]) -> None:
    recorded = load_file(RECORDED)
    assert agree(name, results, {key: recorded[key] for key in (f"{name} in 1", f"{name} in 2")})


@pytest.mark.parametrize("name", ["onnx f", "diffusers"])
def test_exports_hold_what_they_held(name: str, results: dict[str, Tensor]) -> None:
    """A graph's file may differ, and onnxruntime has its own instructions: its output is compared up to rounding."""
    recorded = load_file(RECORDED)[name]
    if name == "onnx f":
        assert torch.allclose(results[name], recorded, rtol=0, atol=1e-5)
    else:
        assert torch.equal(results[name], recorded)
