"""Writes pickles with the structure of the published ones: persistent class records, nested storages, EasyDict.

The names `torch_utils.persistence` and `dnnlib.util` exist only while a file is being written.
"""

import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

HEADER = "# Copyright (c) 2022, NVIDIA CORPORATION & AFFILIATES. All rights reserved.\n#\n"
CC_BY_NC_SA = (
    HEADER + "# This work is licensed under a Creative Commons\n"
    "# Attribution-NonCommercial-ShareAlike 4.0 International License.\n"
)


class EasyDict(dict):
    """A dict subclass, pickled as NEWOBJ and SETITEMS."""


class Persistent:
    """Pickles as `_reconstruct_persistent_obj(meta)`."""

    def __init__(self, class_name: str, source: str, state: Mapping[str, object]) -> None:
        self.meta = EasyDict(type="class", version=6, module_src=source, class_name=class_name, state=dict(state))

    def __reduce__(self) -> tuple[object, ...]:
        return _reconstruct_persistent_obj, (self.meta,), None


def _reconstruct_persistent_obj(meta: EasyDict) -> object:
    """What the usual loader does: it executes the module's source."""
    exec(meta["module_src"], {})
    return meta


@contextmanager
def published_names() -> Iterator[None]:
    """The modules that the pickles refer to, for as long as one is written (or, in a test, opened the usual way)."""
    modules = {name: ModuleType(name) for name in ("torch_utils", "torch_utils.persistence", "dnnlib", "dnnlib.util")}
    modules["torch_utils.persistence"]._reconstruct_persistent_obj = _reconstruct_persistent_obj
    modules["dnnlib.util"].EasyDict = EasyDict
    before = EasyDict.__module__, _reconstruct_persistent_obj.__module__
    EasyDict.__module__, _reconstruct_persistent_obj.__module__ = "dnnlib.util", "torch_utils.persistence"
    sys.modules.update(modules)
    try:
        yield
    finally:
        EasyDict.__module__, _reconstruct_persistent_obj.__module__ = before
        for name in modules:
            del sys.modules[name]


def marking_source(marker: Path, header: str = CC_BY_NC_SA) -> str:
    """Source code that leaves a mark if anyone executes it."""
    return header + f"open({str(marker)!r}, 'w').close()\n"


def module_state(tensors: Mapping[str, Tensor], source: str, init: Mapping[str, object]) -> dict[str, object]:
    """The `__dict__` of a module with these tensors, its submodules persistent records or torch's containers."""
    state = dict(nn.Module().__dict__)
    state.update(_parameters=OrderedDict(), _buffers=OrderedDict(), _modules=OrderedDict())
    state.update(_init_args=(), _init_kwargs=EasyDict(init))
    children: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if rest:
            children.setdefault(head, {})[rest] = tensor
        elif head in ("freqs", "phases", "resample_filter"):
            state["_buffers"][head] = tensor
        else:
            state["_parameters"][head] = nn.Parameter(tensor.clone())
    for name, inside in children.items():
        state["_modules"][name] = child(name, inside, source)
    return state


def child(name: str, tensors: Mapping[str, Tensor], source: str) -> object:
    state = module_state(tensors, source, {})
    if name in ("enc", "dec"):
        container = nn.ModuleDict.__new__(nn.ModuleDict)
        container.__dict__.update(state)
        return container
    return Persistent("Block", source, state)


def network_pickle(
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, object],
    source: str,
    outer_class: str,
    inner: tuple[str, str],
    protocol: int = 4,
) -> bytes:
    """A whole published file: `ema` is an `outer_class` whose submodule `inner` = (name, class) is the network.

    `weights` are named as in the golden files (`model.…`); other names stay in the outer module.
    """
    inner_name, inner_class = inner
    network = {n.removeprefix("model."): w for n, w in weights.items() if n.startswith("model.")}
    outer = module_state({n: w for n, w in weights.items() if not n.startswith("model.")}, source, arguments)
    network_arguments = {k: v for k, v in arguments.items() if k not in ("model_type", "sigma_data", "use_fp16")}
    outer["_modules"][inner_name] = Persistent(inner_class, source, module_state(network, source, network_arguments))
    outer.update(
        img_resolution=arguments["img_resolution"],
        sigma_min=0,
        sigma_max=float("inf"),
        sigma_data=np.float64(0.5),
        training=False,
    )
    content = {
        "ema": Persistent(outer_class, source, outer),
        "loss_fn": Persistent("EDMLoss", source, {"P_mean": -1.2, "P_std": np.float32(1.2), "steps": np.int64(7)}),
        "augment_pipe": None,
        "dataset_kwargs": EasyDict(path="data.zip", use_labels=False, resolution=arguments["img_resolution"]),
    }
    with published_names():
        return pickle.dumps(content, protocol)


def small_pickle(source: str, protocol: int = 4) -> bytes:
    """A file with all kinds of parts and two small tensors, for fuzzing."""
    weights = {"model.map_layer0.weight": torch.arange(6.0).reshape(2, 3), "model.enc.8x8.freqs": torch.ones(2).half()}
    arguments = {"img_resolution": 8, "img_channels": 1, "label_dim": 0, "channel_mult": [1]}
    return network_pickle(weights, arguments, source, "EDMPrecond", ("model", "SongUNet"), protocol)
