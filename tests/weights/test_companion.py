"""A truncated model and its companion: one function on all times, one folder, and what cannot be either."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import tcm
from tcm import Classes, ConsistencySampler, DDPMppConfig, Labels, Model, ModelCard
from tcm.cli.main import app
from tcm.evaluation.second_time import time_grid
from tcm.foundation.errors import TcmError
from tcm.method.sampling import consistency_steps
from tcm.report.playground.page import check_playable
from tcm.weights import inspect
from tcm.weights.diffusers_export import export_diffusers
from tcm.weights.exporting import export_state_dict
from tcm.weights.onnx_export import export_onnx

TINY = DDPMppConfig(channels=8, channel_mult=(1,), blocks=1)
SHARED = {"network": TINY, "image_shape": (1, 4, 4), "condition": Classes(3), "t_max": 80.0}


def lively(seed: int, **fields: object) -> Model:
    torch.manual_seed(seed)
    model = Model.fresh(ModelCard(**(SHARED | fields)))
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def below() -> Model:
    return lively(0, kind="consistency", sampler=ConsistencySampler())


@pytest.fixture(scope="module")
def above() -> Model:
    return lively(1, kind="truncated", sampler=ConsistencySampler(second_time=1.0), t_min=1.0)


@pytest.fixture
def folder(above: Model, below: Model, tmp_path: Path) -> Path:
    above.joined(below).save(tmp_path / "model")
    return tmp_path / "model"


def test_each_time_has_its_network(above: Model, below: Model) -> None:
    """TCM Eq. 5, with the companion at t' itself; rows, conditions and order are kept."""
    whole = above.joined(below).denoiser
    x, labels = torch.randn(5, 1, 4, 4), Labels(torch.tensor([0, 1, 2, 0, 1]))
    t = torch.tensor([80.0, 1.0, 1.1, 0.01, 3.0], dtype=torch.float64)
    with torch.no_grad():
        found, high, low = (f(x, t, labels) for f in (whole, above.denoiser, below.denoiser))
        assert torch.equal(whole(x, t.clamp(min=2.0), labels), above.denoiser(x, t.clamp(min=2.0), labels))
    torch.testing.assert_close(found[[0, 2, 4]], high[[0, 2, 4]])
    torch.testing.assert_close(found[[1, 3]], low[[1, 3]])
    assert not torch.allclose(high[[1, 3]], low[[1, 3]])
    assert (whole.t_min, whole.t_max, whole.t_prime) == (0.002, 80.0, 1.0)


def test_two_steps_by_hand(above: Model, below: Model) -> None:
    """The first step is the model's, the second its companion's, also below t'; one step is as without."""
    whole = above.joined(below)
    for t in (1.0, 0.3):
        streams, labels = tcm.SampleStreams(range(3)), Labels(torch.tensor([0, 1, 2]))
        first, second = streams.normal((1, 4, 4)), streams.normal((1, 4, 4))
        with torch.no_grad():
            x = above.denoiser(80 * first, torch.full((3,), 80.0), labels)
            x = below.denoiser(x + t * second, torch.full((3,), t), labels)
        torch.testing.assert_close(whole.sample(3, times=[80.0, t], labels=[0, 1, 2]), x)
    assert torch.equal(whole.sample(3), above.sample(3))
    with pytest.raises(TcmError, match=r"times\[1\]=0.3 is below 1"):
        list(consistency_steps(above.denoiser, [80.0, 0.3], tcm.SampleStreams(range(1))))


def test_a_folder_with_a_companion(folder: Path, above: Model, below: Model) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "companion.safetensors",
        "config.json",
        "model.safetensors",
    ]
    loaded = tcm.load(folder)
    assert inspect(folder) == loaded.card == above.joined(below).card
    assert loaded.card.companion == below.card
    assert torch.equal(loaded.sample(4, steps=2), above.joined(below).sample(4, steps=2))
    assert "companion: consistency, times 0.002 to 1" in repr(loaded)
    assert loaded.parameters == above.parameters
    assert loaded.sampler.describe(loaded.denoiser, 2, None) == "times 80, 1 (companion)"
    assert loaded.sampler.describe(loaded.denoiser, 1, None) == "times 80"
    assert min(time_grid(loaded)) < 1 == min(time_grid(above))
    loaded.alone.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    alone = tcm.load(folder)
    assert alone.card == above.card
    assert torch.equal(alone.sample(2, steps=2), above.sample(2, steps=2))


def test_sampling_says_who_took_the_step(folder: Path, tmp_path: Path) -> None:
    ended = CliRunner().invoke(
        app, ["sample", str(folder), "-n", "1", "--steps", "2", "--out", str(tmp_path / "a.png")]
    )
    assert ended.exit_code == 0, ended.output
    assert "times 80, 1 (companion)" in ended.output


def test_a_damaged_companion_is_named(folder: Path) -> None:
    (folder / "companion.safetensors").write_bytes(b"nonsense")
    for read in (tcm.load, inspect):
        with pytest.raises(TcmError, match=r"companion.safetensors is damaged"):
            read(folder)
    (folder / "companion.safetensors").unlink()
    for read in (tcm.load, inspect):
        with pytest.raises(TcmError, match=r"companion.safetensors does not exist"):
            read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"t_min": 2.0}, "companion covers 2.0 to 80.0, but must cover t_min=1.0"),
        ({"t_max": 0.5}, "companion covers 0.002 to 0.5, but must cover t_min=1.0"),
        ({"condition": None}, "the companion must have the same image_shape, latents and condition"),
    ],
)
def test_what_cannot_be_a_companion(folder: Path, changes: dict[str, object], message: str) -> None:
    path = folder / "config.json"
    card = json.loads(path.read_text())
    path.write_text(json.dumps(card | {"companion": card["companion"] | changes}))
    with pytest.raises(TcmError, match=r"config.json") as caught:
        inspect(folder)
    assert message in str(caught.value)


def test_no_other_format_has_room_for_one(above: Model, below: Model, tmp_path: Path) -> None:
    joined, out = above.joined(below), tmp_path / "out"
    for write in (partial(export_onnx, joined, out), partial(export_diffusers, joined, out)):
        with pytest.raises(TcmError, match=r"the model has a companion, .*; give model\.alone"):
            write()
    with pytest.raises(TcmError, match=r"the model has a companion"):
        check_playable(joined.card)
    assert not out.exists()


def test_the_command_leaves_it_out_and_says_so(above: Model, below: Model, tmp_path: Path) -> None:
    above.joined(below).save(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--to", "edm-state-dict", "--out", str(tmp_path / "out.safetensors")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "the companion, which samples at t = 1 and below, is left out" in done.stderr


def test_the_references_format_takes_the_model_alone(above: Model, below: Model, tmp_path: Path) -> None:
    file = tmp_path / "out.safetensors"
    with pytest.raises(TcmError, match=r"the model has a companion"):
        export_state_dict(above.joined(below), file)
    assert not file.exists()
    assert export_state_dict(above.joined(below).alone, file) == len(load_file(file))
