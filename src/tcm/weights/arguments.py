"""The reference's constructor arguments: from a pickled module, from text, or from the shapes of the tensors."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.weights.pickles import shown
from tcm.weights.published import Module

POSITIONAL = ("img_resolution", "img_channels", "label_dim")
# Of no consequence for the function: precision, training, layers that are left out.
WITHOUT_EFFECT = frozenset(
    {"use_fp16", "force_fp32", "sigma_min", "sigma_max", "label_dropout", "augment_dim", "logvar_channels"}
    | {"in_channels", "out_channels", "class_name"}
)
# Arguments that may be given as long as they have the value that our networks are made for.
FIXED: dict[str, tuple[object, ...]] = {
    "channel_mult_emb": (4, None),
    "label_balance": (0.5,),
    "concat_balance": (0.5,),
    "channels_per_head": (64,),
    "res_balance": (0.3,),
    "attn_balance": (0.3,),
    "clip_act": (256,),
    "attn_type": ("dot",),
    "emb_norm": (False,),
    "scale": (1.0,),
    "learnable_scale": (False,),
}
# What the reference's classes take where an argument is not given.
DEFAULTS: dict[str, dict[str, object]] = {
    "SongUNet": {"model_channels": 128, "channel_mult": [1, 2, 2, 2], "num_blocks": 4, "dropout": 0.1},
    "UNet": {"model_channels": 192, "channel_mult": [1, 2, 3, 4], "num_blocks": 3, "dropout": 0.0},
}

Multiplier = Annotated[int, Field(gt=0, le=64)]
Side = Annotated[int, Field(gt=0, le=4096)]


class Arguments(BaseModel):
    """The arguments that shape a network, within bounds that keep a hostile file from building a giant."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model_type: Literal["SongUNet", "UNet", "EDM2UNet"]
    img_resolution: Side
    img_channels: int = Field(gt=0, le=64)
    label_dim: int = Field(default=0, ge=0, le=100_000)
    sigma_data: float = Field(default=0.5, gt=0, le=100)
    model_channels: int = Field(gt=0, le=4096)
    channel_mult: list[Multiplier] = Field(min_length=1, max_length=10)
    num_blocks: int = Field(gt=0, le=32)
    attn_resolutions: list[Side] | None = Field(default=None, max_length=10)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    dout_resolutions: list[Side] | None = Field(default=None, min_length=1, max_length=20)
    channel_mult_noise: Multiplier | None = None
    embedding_type: str | None = Field(default=None, max_length=40)
    encoder_type: str | None = Field(default=None, max_length=40)
    decoder_type: str | None = Field(default=None, max_length=40)
    resample_filter: list[int] | None = Field(default=None, max_length=8)


def checked(given: Mapping[str, object], path: Path) -> dict[str, object]:
    """The arguments that matter, each of a sound type and size; any other is an error that names it."""
    for name, allowed in FIXED.items():
        value = given.get(name, allowed[0])
        plain = isinstance(value, int | float | str | type(None))
        if not plain or value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise TcmError(f"{path}: {name} is not {allowed[0]!r}, and no other value is supported")
    matters = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if name not in WITHOUT_EFFECT and name not in FIXED
    }
    try:
        arguments = Arguments.model_validate(matters)
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False)[0]
        name = shown(".".join(str(part) for part in first["loc"]))
        what = "is not known" if first["type"] == "extra_forbidden" else shown(first["msg"])
        raise TcmError(
            f"{path}: the constructor's argument {name}: {what}; only DDPM++ and EDM2 are supported"
        ) from None
    if arguments.model_type != "SongUNet" and arguments.channel_mult_noise is not None:
        raise TcmError(f"{path}: channel_mult_noise={arguments.channel_mult_noise} is not supported for EDM2")
    return arguments.model_dump(exclude_none=True)


def arguments_of_module(module: Module, network: Module, path: Path) -> dict[str, object]:
    """The arguments that a pickled preconditioning and its network were made with."""
    if len(module.arguments) > len(POSITIONAL):
        raise TcmError(
            f"{path}: {shown(module.class_name)} has {len(module.arguments)} unnamed arguments; download it again"
        )
    named = dict(zip(POSITIONAL, module.arguments, strict=False))
    defaults = DEFAULTS["SongUNet" if network.class_name == "SongUNet" else "UNet"]
    given = {**defaults, **network.keyword_arguments, **module.keyword_arguments, **named}
    return checked({**given, "model_type": network.class_name}, path)


def arguments_of_text(metadata: Mapping[str, str], path: Path) -> dict[str, object] | None:
    """The arguments in a safetensors file's metadata, each as JSON; None if there are none."""
    if "model_type" not in metadata:
        return None
    known = {name: value for name, value in metadata.items() if name not in ("format", "license")}
    try:
        arguments = {name: json.loads(value) for name, value in known.items()}
    except (ValueError, RecursionError) as error:
        raise TcmError(f"{path}: its metadata is not JSON ({shown(str(error))}); download it again") from error
    return checked(arguments, path)


def arguments_of_tensors(weights: Mapping[str, Tensor], path: Path) -> dict[str, object]:
    """The arguments that fit the names and shapes of a network's tensors (dropout leaves no trace: 0)."""
    if any(name.endswith("out_norm.weight") for name in weights):
        raise TcmError(f"{path}: its network is ADM (DhariwalUNet), which is not supported; DDPM++ and EDM2 are")
    is_edm2 = any(name.endswith("emb_noise.weight") for name in weights)
    encoder: dict[int, list[Tensor]] = {}
    attention: set[int] = set()
    inputs: Tensor | None = None
    for name, tensor in weights.items():
        match = re.search(r"(?:^|\.)enc\.(\d{1,4})x\1_(conv|block\d+)\.(.+)", name)
        if match is None or tensor.ndim != 4:
            continue
        side, kind, part = int(match[1]), match[2], match[3]
        if kind == "conv":
            inputs = tensor
        elif part in ("conv1.weight", "conv_res1.weight"):
            encoder.setdefault(side, []).append(tensor)
        elif part in ("qkv.weight", "attn_qkv.weight"):
            attention.add(side)
    if inputs is None or not encoder:
        raise TcmError(f"{path}: the network cannot be inferred from its tensors; DDPM++ and EDM2 are supported")
    levels = [encoder[side][0].shape[0] for side in sorted(encoder, reverse=True)]
    unit = math.gcd(*levels) if is_edm2 else inputs.shape[0]
    labels = [tensor for name, tensor in weights.items() if name.endswith(("map_label.weight", "emb_label.weight"))]
    noise = next((tensor for name, tensor in weights.items() if name.endswith("map_layer0.weight")), None)
    found: dict[str, object] = {
        "model_type": "UNet" if is_edm2 else "SongUNet",
        "img_resolution": max(encoder),
        "img_channels": inputs.shape[1] - is_edm2,
        "label_dim": labels[0].shape[-1] if labels and labels[0].ndim else 0,
        "model_channels": unit,
        "channel_mult": [level // unit if unit else 0 for level in levels],
        "num_blocks": len(encoder[max(encoder)]),
        "attn_resolutions": sorted(attention, reverse=True),
    }
    if not is_edm2 and noise is not None and noise.ndim == 2 and unit:
        found["channel_mult_noise"] = noise.shape[1] // unit
    if any("map_noise." in name for name in weights):
        found["embedding_type"] = "fourier"
    return checked(found, path)
