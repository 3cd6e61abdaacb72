"""Torch modules as ONNX graphs with a free batch size, and the module of tensors that a model is exported as."""

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.method.conditions import Condition, Labels
from tcm.method.preconditioning import Denoiser

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

BATCH = "batch"
"""The name of the free dimension, the first of every input and of the output."""


def onnx_bytes(module: nn.Module, inputs: Mapping[str, Tensor], output: str, **metadata: str) -> bytes:
    """A module as an ONNX file: `onnx_graph`, serialised."""
    return onnx_graph(module, inputs, output, metadata).SerializeToString()


def onnx_graph(
    module: nn.Module, inputs: Mapping[str, Tensor], output: str, metadata: Mapping[str, str] | None = None
) -> "ModelProto":
    """A module of one or more tensors, each with a row per image, as an ONNX graph that takes any number of images.

    `inputs` are examples of at least two rows, by the names and in the order that the module takes them. What depends
    on weights alone, such as EDM2's normalised weights, is computed here. What torch notes of its own code in the graph
    is left out: it is two thirds of a small model's file.
    """
    try:
        import onnx  # noqa: F401 (torch needs it, and says so less clearly)
        from onnxscript.optimizer import fold_constants, remove_unused_nodes
    except ImportError as error:
        raise TcmError(f"ONNX graphs need more packages; {how_to_install('onnx')}") from error
    batch = torch.export.Dim(BATCH)
    with _quietly():
        try:
            program = torch.onnx.export(
                _Positional(module).eval(),
                tuple(inputs.values()),
                dynamo=True,
                dynamic_shapes=(tuple({0: batch} for _ in inputs),),
                input_names=list(inputs),
                output_names=[output],
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise TcmError(_problem(module, error)) from error
    assert program is not None  # without a file to write to, torch returns the program
    fold_constants(program.model, input_size_limit=sys.maxsize, output_size_limit=sys.maxsize)
    remove_unused_nodes(program.model)
    graph = program.model_proto
    _check_batch(graph, module)
    _take_no_images(graph.graph)
    _strip(graph)
    for key, value in (metadata or {}).items():
        graph.metadata_props.add(key=key, value=value)
    return graph


class ConsistencyFunction(nn.Module):
    """f(x, t, condition) of tensors alone: the condition's follow x and t, in the order of `condition_inputs`."""

    def __init__(self, denoiser: Denoiser, condition: Condition | None, classes: range = range(0)) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.condition = condition
        self.classes = classes
        """The labels that the model knows, where it takes labels; others make a graph fail."""

    def forward(self, x: Tensor, t: Tensor, *rows: Tensor) -> Tensor:
        """f(x, t) under the condition that these tensors hold, a row for each image."""
        condition = None if self.condition is None else with_inputs(self.condition, rows)
        if isinstance(condition, Labels):
            # A graph cannot raise an error, but no runtime looks up a class of this number.
            known = (condition.index >= self.classes.start) & (condition.index < self.classes.stop)
            condition = Labels(torch.where(known, condition.index, torch.iinfo(torch.int32).max))
        return self.denoiser(x, t, condition)


def condition_inputs(condition: Condition | None) -> dict[str, Tensor]:
    """The tensors that a graph takes for a condition, by the names that it gives them."""
    if condition is None:
        return {}
    if not condition.graph_inputs:
        raise TcmError(
            f"a condition of {type(condition).__name__} cannot be the input of an ONNX graph; name its tensors in the "
            "class's graph_inputs"
        )
    return {name: getattr(condition, field) for field, name in condition.graph_inputs.items()}


def with_inputs(condition: Condition, tensors: Sequence[Tensor]) -> Condition:
    """The condition with these tensors, in the order of `condition_inputs`, in place of its own."""
    # Every condition is a frozen dataclass, which its base class, an interface, does not say.
    return replace(condition, **dict(zip(condition.graph_inputs, tensors, strict=True)))  # type: ignore[type-var]


class _Positional(nn.Module):
    """A module whose inputs torch.export sees as one tuple, whatever the module's own signature."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's notes on its own deprecations, on absent packages and on the names of dimensions."""
    logger = logging.getLogger("torch.onnx")
    usual = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            for kind in (UserWarning, FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        logger.setLevel(usual)


def _problem(module: nn.Module, error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"{type(module).__name__} cannot be written as an ONNX graph ({reason}); its network must be one that "
        "torch.export can trace"
    )


def _check_batch(graph: "ModelProto", module: nn.Module) -> None:
    for value in (*graph.graph.input, *graph.graph.output):
        if (first := value.type.tensor_type.shape.dim[0]).dim_param != BATCH:
            raise TcmError(
                f"{type(module).__name__} fixes the number of its images to {first.dim_value}; in its network use "
                "x.shape[0] instead of len(x)"
            )


def _take_no_images(graph: "GraphProto") -> None:
    """Where no images are given, compute one and drop it: runtimes reshape in ways that no images do not survive."""
    from onnx import TensorProto
    from onnx.helper import make_node, make_tensor

    names = [value.name for value in graph.input]
    (result,) = graph.output
    for node in graph.node:
        node.input[:] = [f"{name}/rows" if name in names else name for name in node.input]
        node.output[:] = [f"{name}/rows" if name == result.name else name for name in node.output]
    none, count, empty, added, pads = (f"rows/{word}" for word in ("none", "count", "empty", "added", "pads"))
    graph.initializer.append(make_tensor(none, TensorProto.INT64, [1], [0]))
    nodes = [
        make_node("Shape", names[:1], [count], count, start=0, end=1),
        make_node("Equal", [count, none], [empty], empty),
        make_node("Cast", [empty], [added], added, to=TensorProto.INT64),
        make_node("Concat", [none, added], [pads], pads, axis=0),
        *(make_node("Pad", [name, pads, "", none], [f"{name}/rows"], f"{name}/rows") for name in names),
        *graph.node,
        make_node("Slice", [f"{result.name}/rows", none, count, none], [result.name], result.name),
    ]
    del graph.node[:]
    graph.node.extend(nodes)


def _strip(model: "ModelProto") -> None:
    graph = model.graph
    del model.metadata_props[:], graph.metadata_props[:], graph.value_info[:]
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        del part.metadata_props[:]
