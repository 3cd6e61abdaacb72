"""ONNX files compute what torch computes, in onnxruntime, for any number of images."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_comparing import largest_difference, largest_level, metadata, run
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from small_models import EDM2, small_model
from text_network import TextConfig, Texts

import tcm
from tcm.foundation.errors import TcmError
from tcm.method.conditions import ConditionKind
from tcm.networks import NetworkConfig
from tcm.networks.text_unet import TextUNetConfig
from tcm.weights import onnx_export
from tcm.weights.onnx_export import export_onnx, function_graph
from tcm.weights.onnx_graphs import condition_inputs

pytestmark = pytest.mark.long


def test_a_ddpmpp_without_classes(tmp_path: Path) -> None:
    model = small_model(tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1, attention=(8,)))
    f, *samplers = export_onnx(model, tmp_path / "out")
    assert f.difference < 1e-5
    for count in (1, 3):
        assert largest_difference(f.path, model, count, None) < 1e-5
        for steps, sampler in enumerate(samplers, 1):
            assert largest_level(sampler.path, model, steps, count, None) <= 1


@pytest.mark.slow
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


def test_labels_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    """No class (−1) is known only to a model that was trained without its classes too; −5 and 99 to none."""
    for name, extra, labels in (("without", {}, [0, 1, 2]), ("with", {"knows_null": True}, [-1, 0, 1, 2])):
        network = tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1, attention=())
        model = small_model(network, tcm.Classes(3), extra=extra)
        f, one, two = export_onnx(model, tmp_path / name)
        chosen = tcm.Labels(torch.tensor(labels))
        for file in (f, one, two):
            assert json.loads(metadata(file.path)["labels"]) == labels
        assert largest_difference(f.path, model, len(labels), chosen) < 1e-5
        assert largest_level(one.path, model, 1, len(labels), chosen) <= 1
        none = {"noise": torch.zeros(0, 3, 8, 8), "noise_2": torch.zeros(0, 3, 8, 8)}
        assert run(two.path, **none, label=torch.zeros(0, dtype=torch.long)).shape == (0, 3, 8, 8)
        for label in {-5, -4, -1, 3, 99} - set(labels):
            wrong = torch.tensor([0, label])
            with pytest.raises(InvalidArgument, match="out of data bounds"):
                run(f.path, x=torch.zeros(2, 3, 8, 8), t=torch.ones(2), label=wrong)
            with pytest.raises(InvalidArgument, match="out of data bounds"):
                run(two.path, noise=torch.zeros(2, 3, 8, 8), noise_2=torch.zeros(2, 3, 8, 8), label=wrong)


@pytest.mark.parametrize(
    ("network", "condition"),
    [
        (tcm.DDPMppConfig(channels=16, channel_mult=(1,), blocks=1, attention=()), None),
        (TextUNetConfig(channels=16, channel_mult=(1,), blocks=1, attention=()), tcm.Texts("", 8, 4)),
        pytest.param(EDM2, tcm.Classes(5), marks=pytest.mark.slow),
    ],
)
def test_no_images(network: NetworkConfig, condition: ConditionKind) -> None:
    """Runtimes lay out 16 channels in another way than fewer."""
    graph = function_graph(small_model(network, condition))
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    inputs = {given.name: np.zeros((0, *given.shape[1:]), kinds[given.type]) for given in session.get_inputs()}
    (found,) = session.run(None, inputs)
    assert found.shape == (0, 3, 8, 8)


TEXTS = Texts(100)  # a weight of more than 1 kB


@pytest.fixture(scope="module")
def text_model() -> tcm.Model:
    return small_model(TextConfig(), TEXTS)


def test_text_embeddings_are_inputs(text_model: tcm.Model, tmp_path: Path) -> None:
    f, one, _ = export_onnx(text_model, tmp_path / "out")
    texts = TEXTS.spread(4)
    assert {"tokens", "mask"} == set(condition_inputs(texts))
    assert largest_difference(f.path, text_model, 4, texts) < 1e-5
    assert largest_difference(f.path, text_model, 4, texts.null()) < 1e-5
    assert largest_level(one.path, text_model, 1, 4, texts) <= 1


def test_weights_that_one_file_cannot_hold_are_shared_by_all_graphs(
    text_model: tcm.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "ONE_FILE", 0)
    f, one, _ = export_onnx(text_model, tmp_path / "out")
    (shared,) = (tmp_path / "out").glob("*.data")
    assert f.bytes == f.path.stat().st_size + shared.stat().st_size
    assert largest_difference(f.path, text_model, 2, TEXTS.spread(2)) < 1e-5
    assert largest_level(one.path, text_model, 1, 2, TEXTS.spread(2)) <= 1


def test_a_diffusion_model_has_no_sampler_in_a_graph(tmp_path: Path) -> None:
    model = small_model(TextConfig(), TEXTS, kind="diffusion", sampler=tcm.HeunSampler(), t_min=0.002)
    assert [file.path.name for file in export_onnx(model, tmp_path / "out")] == ["f.onnx"]


def test_latents_have_no_sampler_in_a_graph(tmp_path: Path) -> None:
    model = small_model(TextConfig(), TEXTS, channels=4)
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
    model = small_model(TextConfig(frozen_batch=True), TEXTS)
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
