"""The constructor arguments of EDM's and EDM2's U-Nets: checked, or inferred from the shapes of their tensors."""

import math
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from tcm.foundation.errors import TcmError

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

Multiplier = Annotated[int, Field(gt=0, le=64)]
Side = Annotated[int, Field(gt=0, le=4096)]


class UNetArguments(BaseModel):
    """The arguments that shape a network, within bounds that keep a hostile file from building a huge network."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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


def checked(given: Mapping[str, object]) -> dict[str, object]:
    """The arguments that matter, each of a valid type and size; any other is an error that names it."""
    for name, allowed in FIXED.items():
        value = given.get(name, allowed[0])
        plain = isinstance(value, int | float | str | type(None))
        if not plain or value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise TcmError(f"{name} is not {allowed[0]!r}; no other value is supported")
    matters = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if name not in WITHOUT_EFFECT and name not in FIXED
    }
    return UNetArguments.model_validate(matters).model_dump(exclude_none=True)


def infer(
    weights: Mapping[str, Tensor], *, width: str, attention: str, one_more_input: bool
) -> dict[str, object] | None:
    """The arguments that fit the names and shapes of a U-Net's tensors (dropout leaves no trace: 0).

    `width` is a block's convolution whose outputs are its channels, `attention` that of its queries, keys and values.
    """
    encoder: dict[int, list[Tensor]] = {}
    attends: set[int] = set()
    inputs: Tensor | None = None
    for name, tensor in weights.items():
        match = re.search(r"(?:^|\.)enc\.(\d{1,4})x\1_(conv|block\d+)\.(.+)", name)
        if match is None or tensor.ndim != 4:
            continue
        side, kind, part = int(match[1]), match[2], match[3]
        if kind == "conv":
            inputs = tensor
        elif part == f"{width}.weight":
            encoder.setdefault(side, []).append(tensor)
        elif part == f"{attention}.weight":
            attends.add(side)
    if inputs is None or not encoder:
        return None
    levels = [encoder[side][0].shape[0] for side in sorted(encoder, reverse=True)]
    unit = math.gcd(*levels) if one_more_input else inputs.shape[0]
    labels = [tensor for name, tensor in weights.items() if name.endswith(("map_label.weight", "emb_label.weight"))]
    return {
        "img_resolution": max(encoder),
        "img_channels": inputs.shape[1] - one_more_input,
        "label_dim": labels[0].shape[-1] if labels and labels[0].ndim else 0,
        "model_channels": unit,
        "channel_mult": [level // unit if unit else 0 for level in levels],
        "num_blocks": len(encoder[max(encoder)]),
        "attn_resolutions": sorted(attends, reverse=True),
    }
