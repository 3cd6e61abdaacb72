"""What onnxruntime makes of an exported file, against torch."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

import tcm
from tcm.data.pixels import to_uint8
from tcm.method.conditions import Condition
from tcm.weights.onnx_graphs import condition_inputs


def run(path: Path, **inputs: Tensor) -> np.ndarray:
    """The result of a graph that takes exactly these inputs."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert {value.name for value in session.get_inputs()} == set(inputs)
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return found


def metadata(path: Path) -> dict[str, str]:
    """What a file says of its model."""
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
