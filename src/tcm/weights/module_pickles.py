"""Published module pickles (EDM, EDM2, ECT, TCM): what they hold, as data.

Such a file pickles whole modules. Each reduces to `_reconstruct_persistent_obj(meta)`, where `meta` carries the
source code of the module (text to us), the name of its class and its state: parameters, buffers, submodules and the
arguments that it was made with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from tcm.weights.pickles import Constructor, Record, Refused, read_pickle, shown
from tcm.weights.torchfiles import TensorBuilder, empty_dict, map_file

PERSISTENT = "torch_utils.persistence._reconstruct_persistent_obj"
CONTAINER_MODULES = ("ModuleDict", "ModuleList", "Sequential", "ParameterDict", "ParameterList")
NUMPY_SCALARS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})
MAX_NAME = 300


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One module of the file: its class's name, the arguments it was made with, and what it contains."""

    class_name: str
    source: str
    arguments: tuple[object, ...]
    keyword_arguments: dict[str, object]
    state: dict[str, object]


def read_published(path: Path) -> object:
    """The value in a module pickle, as plain values, tensors and inert records; nothing in it is run.

    >>> as_module(read_published(Path("edm-cifar10-32x32-uncond-vp.pkl"))["ema"]).class_name  # doctest: +SKIP
    'EDMPrecond'
    """
    mapped = map_file(path)
    return read_pickle(memoryview(mapped), published_constructors(len(mapped)), str(path))


def published_constructors(file_size: int) -> dict[str, Constructor]:
    """The whitelist: every name that a published module pickle may mention."""
    builder = TensorBuilder(file_size)
    return {
        **builder.constructors(),
        "torch.storage._load_from_bytes": builder.storage,
        "dnnlib.util.EasyDict": empty_dict,
        "numpy.dtype": lambda arguments: Record("numpy.dtype", arguments),
        "numpy.core.multiarray.scalar": numpy_scalar,
        "numpy._core.multiarray.scalar": numpy_scalar,
        PERSISTENT: lambda arguments: Record(PERSISTENT, arguments),
        **{f"torch.nn.modules.container.{name}": inert(name) for name in CONTAINER_MODULES},
    }


def inert(name: str) -> Constructor:
    """A constructor that only notes what it was given."""
    return lambda arguments: Record(name, arguments)


def numpy_scalar(arguments: tuple[object, ...]) -> object:
    """`numpy.core.multiarray.scalar(dtype, bytes)`: a plain number; never an object."""
    if len(arguments) != 2:
        raise Refused("a numpy scalar without its bytes")
    dtype, data = arguments
    if not isinstance(dtype, Record) or dtype.name != "numpy.dtype" or not dtype.arguments:
        raise Refused("a numpy scalar without its type")
    code = dtype.arguments[0]
    if type(code) is not str or code not in NUMPY_SCALARS:
        raise Refused("a numpy scalar that is not a number")
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    if order not in ("<", "|"):
        raise Refused("a numpy scalar that is not little-endian")
    numpy_type = np.dtype(f"<{code}")
    if not isinstance(data, memoryview) or len(data) != numpy_type.itemsize:
        raise Refused("a numpy scalar whose size is not that of its type")
    return np.frombuffer(data, numpy_type)[0].item()


def as_module(value: object) -> Module | None:
    """The module in a persistent record, or None if `value` is something else."""
    if not isinstance(value, Record) or value.name != PERSISTENT or len(value.arguments) != 1:
        return None
    meta = value.arguments[0]
    if not isinstance(meta, dict) or meta.get("type") != "class":
        return None
    class_name, source, state = meta.get("class_name"), meta.get("module_src"), meta.get("state")
    if not isinstance(class_name, str) or not isinstance(source, str) or not isinstance(state, dict):
        return None
    arguments, keywords = state.get("_init_args", ()), state.get("_init_kwargs", {})
    if not isinstance(arguments, tuple | list) or not isinstance(keywords, dict):
        return None
    return Module(class_name, source, tuple(arguments), keywords, state)


def submodules(state: object) -> dict[str, object]:
    """The records in a module's `_modules`."""
    modules = state.get("_modules") if isinstance(state, dict) else None
    return modules if isinstance(modules, dict) else {}


def tensors(value: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a module with their full names, as `Module.state_dict` would list them.

    Depth and number are bounded: the machine refuses pickles that nest or unfold without end.
    """
    module = as_module(value)
    state = module.state if module else value.state if isinstance(value, Record) else None
    if not isinstance(state, dict):
        return
    for group in ("_parameters", "_buffers"):
        members = state.get(group)
        if members is not None and not isinstance(members, dict):
            raise Refused(f"{shown(prefix)}{group}, which is not a dict")
        for name, tensor in (members or {}).items():
            if isinstance(tensor, Tensor):
                yield f"{prefix}{name}", tensor
    for name, child in submodules(state).items():
        if len(prefix) + len(str(name)) > MAX_NAME:
            raise Refused(f"a name of more than {MAX_NAME} characters")
        yield from tensors(child, f"{prefix}{name}.")
