"""A sampler as one ONNX graph: the graph of f once for each step, with the same weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tcm.weights.onnx_graphs import BATCH

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

OWN = "sampler/"
"""Before the names of what is not part of f."""


def noise_names(steps: int) -> list[str]:
    """The graph's inputs for noise: `noise`, `noise_2`, …."""
    return ["noise", *(f"noise_{step}" for step in range(2, steps + 1))]


def sampler_graph(f: "ModelProto", times: Sequence[float], image_shape: Sequence[int]) -> "ModelProto":
    """x ← f(x + t ε, t) for each t, then pixels: noise for each time, and the condition of f ↦ uint8 images.

    `f` takes x and t, then its condition. Torch could trace the sampler too, but it takes as long again for each step.
    """
    import onnx
    from onnx import TensorProto
    from onnx.helper import make_node, make_tensor, make_tensor_value_info

    sampler = onnx.ModelProto()
    sampler.CopyFrom(f)
    graph = sampler.graph
    del graph.node[:], graph.input[:], graph.output[:]
    images: list[str | int | None] = [BATCH, *image_shape]
    noises = noise_names(len(times))
    graph.input.extend(make_tensor_value_info(name, TensorProto.FLOAT, images) for name in noises)
    graph.input.extend(f.graph.input[2:])
    graph.output.append(make_tensor_value_info("image", TensorProto.UINT8, images))
    graph.node.append(make_node("Shape", ["noise"], [f"{OWN}batch"], start=0, end=1))
    graph.initializer.extend(_numbers({"scale": 127.5, "offset": 128.0, "lowest": 0.0, "highest": 255.0}))
    graph.initializer.extend(
        make_tensor(f"{OWN}t_{step}", TensorProto.FLOAT, [1], [t]) for step, t in enumerate(times, 1)
    )
    x = ""
    for step, noise in enumerate(noises, 1):
        t, times_of_all, x_t = f"{OWN}t_{step}", f"{OWN}t_{step}_of_all", f"{OWN}x_{step}"
        scaled = f"{x_t}_noise" if x else x_t
        graph.node.append(make_node("Expand", [t, f"{OWN}batch"], [times_of_all]))
        graph.node.append(make_node("Mul", [noise, t], [scaled]))
        if x:
            graph.node.append(make_node("Add", [x, scaled], [x_t]))
        graph.node.extend(_copies(f, f"step_{step}/", {"x": x_t, "t": times_of_all}))
        x = f"step_{step}/{f.graph.output[0].name}"
    graph.node.extend(_to_pixels(x))
    return sampler


def _to_pixels(x: str) -> list["NodeProto"]:
    """`tcm.data.pixels.to_uint8`."""
    from onnx import TensorProto
    from onnx.helper import make_node

    return [
        make_node("Mul", [x, f"{OWN}scale"], [f"{OWN}scaled"]),
        make_node("Add", [f"{OWN}scaled", f"{OWN}offset"], [f"{OWN}shifted"]),
        make_node("Clip", [f"{OWN}shifted", f"{OWN}lowest", f"{OWN}highest"], [f"{OWN}clipped"]),
        make_node("Cast", [f"{OWN}clipped"], ["image"], to=TensorProto.UINT8),
    ]


def _numbers(named: Mapping[str, float]) -> Iterator["TensorProto"]:
    from onnx import TensorProto
    from onnx.helper import make_tensor

    return (make_tensor(f"{OWN}{name}", TensorProto.FLOAT, [], [value]) for name, value in named.items())


def _copies(f: "ModelProto", prefix: str, inputs: Mapping[str, str]) -> Iterator["NodeProto"]:
    """The nodes of f with `inputs` in place of its own, and a prefix before all that is computed."""
    from onnx import NodeProto

    computed = {name for node in f.graph.node for name in node.output if name}
    renamed = {name: f"{prefix}{name}" for name in computed} | dict(inputs)
    for node in f.graph.node:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}{node.name}"
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        copy.output[:] = [renamed.get(name, name) for name in node.output]
        yield copy
