"""A model as ONNX files: f and its samplers, each compared with torch before the folder appears."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tcm.data.pixels import to_uint8
from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.foundation.files import new_folder
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition
from tcm.method.preconditioning import Denoiser
from tcm.method.sampling import last
from tcm.weights.card import ModelCard
from tcm.weights.model import Model
from tcm.weights.onnx_graphs import ConsistencyFunction, condition_inputs, onnx_graph, with_inputs
from tcm.weights.onnx_sampler import noise_names, sampler_graph

if TYPE_CHECKING:
    from onnx import ModelProto

FUNCTION_FILE = "f.onnx"
BOUNDS = {"fp32": 1e-4, "fp16": 0.05}
"""The largest difference from torch, relative to the largest value, at which a file is written."""
ONE_FILE = 2**31 - 2**20
"""Bytes of weights up to which a graph is one file; a protobuf message holds less than 2 GiB."""
PICTURE_CHANNELS = (1, 3)
"""Of grey and of RGB pixels; anything else are latents, which a sampler's graph cannot turn into pixels."""
COMPARED = 5
"""Images that are compared with torch's: another number than a graph is traced with."""


@dataclass(frozen=True)
class OnnxFile:
    """A graph that was written, and its largest difference from torch: of f a number, of pixels in levels of 255."""

    path: Path
    bytes: int
    difference: float
    pixels: bool

    def __str__(self) -> str:
        difference = f"{self.difference:.0f} levels of 255" if self.pixels else f"{self.difference:.1e}"
        return f"{self.path}: {self.bytes / 1e6:.2f} MB, largest difference from torch {difference}"


@dataclass(frozen=True)
class _Comparison:
    """What a graph is given, and what torch makes of it."""

    inputs: dict[str, Tensor]
    expected: Tensor


def export_onnx(model: Model, out: Path, *, half: bool = False) -> list[OnnxFile]:
    """Write f.onnx and a graph for each usual number of steps, such as one-step.onnx, into a new folder.

    f takes x, t and the condition's tensors; a sampler takes noise and the condition's tensors, and gives uint8 images.
    All take any number of images. With `half` the network computes in fp16; what goes in and out stays the same. A
    graph that differs from torch by more than `BOUNDS` allows is an error, and then nothing is written.
    """
    model.card.check_alone("a graph")
    try:
        import onnxruntime  # noqa: F401 (it compares; asked for before the work begins)
    except ImportError as error:
        raise TcmError(f"ONNX graphs need more packages; {how_to_install('onnx')}") from error
    if out.exists():
        raise TcmError(f"--out={out} exists; name a new folder")
    model = Model(copy.deepcopy(model.denoiser).cpu(), model.card)
    precision = "fp16" if half else "fp32"
    files = []
    with new_folder(out) as folder:
        for name, graph, comparison in _graphs(model, half):
            for key, value in (describe(model.card) | {"precision": precision}).items():
                graph.metadata_props.add(key=key, value=value)
            size = _save(graph, folder / name)
            difference = _difference(folder / name, comparison, BOUNDS[precision])
            files.append(OnnxFile(out / name, size, difference, comparison.expected.dtype == torch.uint8))
    return files


def function_graph(model: Model, half: bool = False) -> "ModelProto":
    """f(x, t, condition) of a model; with `half` its network computes in fp16."""
    condition = None if model.card.condition is None else model.card.condition.dummy(2)
    inputs = {"x": torch.zeros(2, *model.card.image_shape), "t": torch.full((2,), model.card.t_max)}
    denoiser = _halved(model.denoiser) if half else model.denoiser
    f = ConsistencyFunction(denoiser, condition, model.card.labels)
    return onnx_graph(f, inputs | condition_inputs(condition), "image")


def describe(card: ModelCard) -> dict[str, str]:
    """What a file says of its model: text, or JSON for what is not."""
    return {
        "library": card.library,
        "method": card.kind,
        "image_shape": json.dumps(card.image_shape),
        "sigma_data": json.dumps(card.sigma_data),
        "t_min": json.dumps(card.t_min),
        "t_max": json.dumps(card.t_max),
        "condition": json.dumps(card.model_dump(mode="json")["condition"]),
        **({"labels": json.dumps(list(card.labels))} if card.labels else {}),
        "licence": card.provenance.licence or "not stated",
    }


def _graphs(model: Model, half: bool) -> Iterator[tuple[str, "ModelProto", _Comparison]]:
    f = function_graph(model, half)
    yield FUNCTION_FILE, f, _comparison_of_function(model)
    if model.card.image_shape[0] not in PICTURE_CHANNELS:
        return
    for steps in model.sampler.usual_steps:
        times = model.sampler.times(model.denoiser, steps)
        if times is None:
            continue
        graph = sampler_graph(f, times, model.card.image_shape)
        del graph.metadata_props[:]
        graph.metadata_props.add(key="times", value=json.dumps(times))
        yield f"{model.sampler.name(steps).replace(' ', '-')}.onnx", graph, _comparison_of_sampler(model, steps)


def _halved(denoiser: Denoiser) -> Denoiser:
    """A copy whose network's weights are fp16. Its constants, such as frequencies, keep their precision."""
    denoiser = copy.deepcopy(denoiser)
    for parameter in denoiser.network.parameters():
        parameter.data = parameter.data.half()
    return denoiser


def _conditions(model: Model) -> Condition | None:
    """Conditions to compare with, the last of them null if the model knows it; dummies may be zeros, which would hide
    errors."""
    if model.card.condition is None:
        return None
    condition = model.card.condition.dummy(COMPARED)
    varied = with_inputs(condition, [_varied(tensor) for tensor in condition_inputs(condition).values()])
    return varied.keep(torch.arange(COMPARED) < COMPARED - model.card.knows_null)


def _varied(tensor: Tensor) -> Tensor:
    """Random numbers; a random mask, of which the first column is true; class numbers as they are."""
    generator = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    if tensor.dtype == torch.bool:
        drawn = torch.rand(tensor.shape, generator=generator) < 0.5
        return torch.cat([torch.ones_like(drawn[:, :1]), drawn[:, 1:]], dim=1)
    return tensor


@fp32_products("ieee")
@torch.no_grad()
def _comparison_of_function(model: Model) -> _Comparison:
    """Each image at another time, from the lowest to the highest."""
    t = torch.logspace(0, 1, COMPARED, base=model.card.t_max / model.card.t_min).mul(model.card.t_min)
    t = t.clamp(model.card.t_min, model.card.t_max)
    noise = SampleStreams(range(COMPARED)).normal(model.card.image_shape)
    x = noise * (t**2 + model.card.sigma_data**2).sqrt()[:, None, None, None]
    condition = _conditions(model)
    return _Comparison({"x": x, "t": t} | condition_inputs(condition), model.denoiser(x, t, condition))


@fp32_products("ieee")
def _comparison_of_sampler(model: Model, steps: int) -> _Comparison:
    seeds, condition = range(COMPARED), _conditions(model)
    images = last(model.sampler.run(model.denoiser, SampleStreams(seeds), condition, steps=steps))
    streams = SampleStreams(seeds)
    noise = {name: streams.normal(model.card.image_shape) for name in noise_names(steps)}
    return _Comparison(noise | condition_inputs(condition), to_uint8(images))


def _save(graph: "ModelProto", path: Path) -> int:
    """Write a graph, with weights that one file cannot hold in another beside it; returns the bytes of both.

    The graph then names that file in place of those weights, and so do graphs that are made of it.
    """
    import onnx

    weights = sum(len(tensor.raw_data) for tensor in graph.graph.initializer)
    onnx.save_model(
        graph,
        path,
        save_as_external_data=weights > ONE_FILE,
        location=f"{path.name}.data",
    )
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def _difference(path: Path, comparison: _Comparison, bound: float) -> float:
    """The largest difference between a file's result and torch's; an error above the bound."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in comparison.inputs.items()})
    expected = comparison.expected.numpy()
    difference = float(np.abs(found.astype(np.float64) - expected).max())
    # A pixel on the edge between two levels may round to either, so one more level than the bound.
    limit = 1 + bound * 127.5 if expected.dtype == np.uint8 else bound * max(1.0, float(np.abs(expected).max()))
    if not difference <= limit:
        raise TcmError(
            f"{path.name} differs from torch by {difference:.3g}, more than {limit:.3g}; nothing was written. Please "
            "report this, with the versions of torch, onnx and onnxruntime"
        )
    return difference
