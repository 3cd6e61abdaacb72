"""ONNX files compute what torch computes, in onnxruntime, for any number of images."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_models import EDM2, small_model
from text_network import TextConfig, Texts
from torch import Tensor
from typer.testing import CliRunner

import tcm
from tcm.cli import app
from tcm.data.pixels import to_uint8
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition
from tcm.weights import onnx_export
from tcm.weights.onnx_export import export_onnx
from tcm.weights.onnx_graphs import condition_inputs


def run(path: Path, **inputs: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert {value.name for value in session.get_inputs()} == set(inputs)
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return found


def metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def largest_difference(path: Path, model: tcm.Model, count: int, condition: Condition | None) -> float:
    """Of f, with each image at its own time."""
    x, t = torch.randn(count, *model.card.image_shape) * 3, torch.linspace(1.0, 80.0, count)
    with torch.no_grad():
        expected = model.denoiser(x, t, condition).numpy()
    assert expected.std() > 0.1
    return float(np.abs(run(path, x=x, t=t, **condition_inputs(condition)) - expected).max())


def largest_level(path: Path, model: tcm.Model, steps: int, count: int, condition: Condition | None) -> int:
    """Of a sampler, against `Model.sample` with the same seeds."""
    streams = tcm.SampleStreams(range(count))
    noise = {name: streams.normal(model.card.image_shape) for name in ("noise", "noise_2")[:steps]}
    found = run(path, **noise, **condition_inputs(condition))
    assert found.dtype == np.uint8
    expected = to_uint8(model.sample(count, steps=steps, condition=condition)).numpy()
    assert expected.std() > 1
    return int(np.abs(found.astype(int) - expected).max())


def test_digits_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", "digits", "--to", "onnx"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    folder, model = tmp_path / "digits-onnx", tcm.load("digits")
    lines = result.output.splitlines()
    assert [line.split(":")[0].rpartition("/")[2] for line in lines] == ["f.onnx", "one-step.onnx", "two-steps.onnx"]
    assert all("largest difference from torch" in line for line in lines)
    for count in (1, 6):
        labels = tcm.Labels(torch.arange(count) - 1)  # −1: no class
        assert largest_difference(folder / "f.onnx", model, count, labels) < 1e-5
        for steps, name in ((1, "one-step.onnx"), (2, "two-steps.onnx")):
            assert largest_level(folder / name, model, steps, count, tcm.Labels(torch.arange(count))) <= 1
    assert max(path.stat().st_size for path in folder.iterdir()) < 300_000, "stripped"
    said = metadata(folder / "two-steps.onnx")
    assert said["method"] == "truncated"
    assert json.loads(said["times"]) == [80.0, 1.0]
    assert json.loads(said["sigma_data"]) == 0.75
    assert json.loads(said["condition"])["count"] == 10
    assert said["licence"] == "not stated"
    assert "times" not in metadata(folder / "f.onnx")
    again = CliRunner().invoke(app, ["export", "digits", "--to", "onnx"])
    assert "exists; name a new folder" in str(again.exception)


def test_a_ddpmpp_without_classes(tmp_path: Path) -> None:
    model = small_model(tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1, attention=(8,)))
    f, *samplers = export_onnx(model, tmp_path / "out")
    assert f.difference < 1e-5
    for count in (1, 3):
        assert largest_difference(f.path, model, count, None) < 1e-5
        for steps, sampler in enumerate(samplers, 1):
            assert largest_level(sampler.path, model, steps, count, None) <= 1


def test_an_edm2_with_classes_in_fp16(tmp_path: Path) -> None:
    """Its weights are normalised when the file is made, and its uncertainty head, which f does not use, stays out."""
    condition = tcm.Classes(5, ("ant", "bee", "cat", "dog", "eel"))
    model = small_model(EDM2, condition, uncertainty=8)
    f, *samplers = export_onnx(model, tmp_path / "out", half=True)
    weights = {tensor.name: tensor for tensor in onnx.load(f.path).graph.initializer}
    half = [tensor for tensor in weights.values() if tensor.data_type == onnx.TensorProto.FLOAT16]
    assert sum(len(tensor.raw_data) for tensor in half) > 0.8 * f.bytes
    assert not any("uncertainty" in name for name in weights)
    assert not any(node.op_type == "ReduceL2" and node.input[0] in weights for node in onnx.load(f.path).graph.node)
    labels = condition.spread(4)
    assert 1e-6 < largest_difference(f.path, model, 4, labels) < 0.01
    for steps, sampler in enumerate(samplers, 1):
        assert largest_level(sampler.path, model, steps, 4, labels) <= 2
    assert json.loads(metadata(f.path)["condition"])["names"] == list(condition.names)
    assert metadata(f.path)["precision"] == "fp16"


@pytest.fixture(scope="module")
def text_model() -> tcm.Model:
    return small_model(TextConfig(), Texts(3), channels=6)  # a weight of more than 1 kB


def test_text_embeddings_are_inputs(text_model: tcm.Model, tmp_path: Path) -> None:
    f, one, _ = export_onnx(text_model, tmp_path / "out")
    texts = Texts(3).spread(4)
    assert {"tokens", "mask"} == set(condition_inputs(texts))
    assert largest_difference(f.path, text_model, 4, texts) < 1e-5
    assert largest_difference(f.path, text_model, 4, texts.null()) < 1e-5
    assert largest_level(one.path, text_model, 1, 4, texts) <= 1


def test_weights_that_one_file_cannot_hold(
    text_model: tcm.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "ONE_FILE", 0)
    f, *_ = export_onnx(text_model, tmp_path / "out")
    assert (tmp_path / "out" / "f.onnx.data").is_file()
    assert f.bytes == f.path.stat().st_size + (tmp_path / "out" / "f.onnx.data").stat().st_size
    assert largest_difference(f.path, text_model, 2, Texts(3).spread(2)) < 1e-5


def test_a_diffusion_model_has_no_sampler_in_a_graph(tmp_path: Path) -> None:
    model = small_model(TextConfig(), Texts(3), kind="diffusion", sampler=tcm.HeunSampler(), t_min=0.002)
    assert [file.path.name for file in export_onnx(model, tmp_path / "out")] == ["f.onnx"]


def test_a_file_that_differs_is_refused(text_model: tcm.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = onnx_export.sampler_graph

    def wrong(f: onnx.ModelProto, times: list[float], shape: tuple[int, ...]) -> onnx.ModelProto:
        return usual(f, [time * 0.9 for time in times], shape)

    monkeypatch.setattr(onnx_export, "sampler_graph", wrong)
    with pytest.raises(
        TcmError, match=r"two-steps.onnx differs from torch by \d+, more than 1.01; nothing was written"
    ):
        export_onnx(text_model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_fixes_its_batch_is_refused(tmp_path: Path) -> None:
    model = small_model(TextConfig(frozen_batch=True), Texts(3))
    with pytest.raises(TcmError, match=r"fixes the number of its images to 2; in its network use x.shape\[0\]"):
        export_onnx(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript.optimizer", "onnxruntime"])
def test_without_the_extra(
    package: str, text_model: tcm.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TcmError, match=r"ONNX graphs need more packages; run `pip install -e '.\[onnx\]'`"):
        export_onnx(text_model, tmp_path / "out")
