"""DDPM++ as EDM uses it for CIFAR-10: 55.7 M parameters at 128 channels, multipliers 2, 2, 2, 4 blocks."""

import re
from collections.abc import Iterable, Mapping
from math import sqrt
from typing import ClassVar, Literal, Self, cast

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition, ConditionKind
from tcm.method.preconditioning import Masks, Network
from tcm.networks.base import Blocks, ImageShape
from tcm.networks.forward_mode import attend, concatenated, conv2d, group_norm, scale_
from tcm.networks.layers import (
    BlockPlan,
    Levels,
    Resample,
    Resolutions,
    UNetConfig,
    class_count,
    decoder_plan,
    drop,
    encoder_plan,
    level_shape,
    linear_float32,
    listed,
    merge_heads,
    one_hot,
    published_names,
    resample,
    resolution,
    split_heads,
    translate,
)
from tcm.networks.unet_arguments import infer

PUBLISHED_PARTS = {
    "norm_0": "norm0",
    "conv_0": "conv0",
    "affine": "affine",
    "norm_1": "norm1",
    "conv_1": "conv1",
    "skip": "skip",
    "attention.norm": "norm2",
    "attention.qkv": "qkv",
    "attention.proj": "proj",
}
PUBLISHED_OUTSIDE = {"embed_label": "map_label", "embed_0": "map_layer0", "embed_1": "map_layer1"}
PUBLISHED_FIXED: dict[str, object] = {
    "embedding_type": "positional",
    "encoder_type": "standard",
    "decoder_type": "standard",
    "resample_filter": [1, 1],
}


class DDPMppConfig(UNetConfig):
    """DDPM++; the defaults are EDM's for CIFAR-10."""

    kind: Literal["ddpmpp"] = "ddpmpp"
    channels: PositiveInt = Field(default=128, multiple_of=2)
    channel_mult: Levels = (2, 2, 2)
    blocks: Blocks = 4
    attention: Resolutions = (16,)
    noise_mult: int = Field(default=1, gt=0, description="channels of the noise embedding, in units of `channels`")

    builds_from_values: ClassVar[bool] = True
    published_types: ClassVar[tuple[str, ...]] = ("SongUNet",)
    published_defaults: ClassVar[Mapping[str, object]] = {
        "model_channels": 128,
        "channel_mult": [1, 2, 2, 2],
        "num_blocks": 4,
        "dropout": 0.1,
    }

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "DDPMpp":
        self.check(image_shape)
        return DDPMpp(self, image_shape, class_count(condition))

    def check(self, image_shape: ImageShape) -> None:
        """Refuse images that the levels do not divide, and widths that the groups of a normalisation do not."""
        super().check(image_shape)
        encoder, decoder = block_plans(self, image_shape)
        check_groups(self, encoder[1:] + decoder)

    @classmethod
    def infer_published(cls, weights: Mapping[str, Tensor]) -> dict[str, object] | None:
        """EDM's SongUNet; ADM, whose tensors have much the same names, has an `out_norm`."""
        found = infer(weights, width="conv1", attention="qkv", one_more_input=False)
        if found is None or any(name.endswith("out_norm.weight") for name in weights):
            return None
        noise = next((tensor for name, tensor in weights.items() if name.endswith("map_layer0.weight")), None)
        if noise is not None and noise.ndim == 2 and found["model_channels"]:
            found["channel_mult_noise"] = noise.shape[1] // cast(int, found["model_channels"])
        return found | ({"embedding_type": "fourier"} if any("map_noise." in name for name in weights) else {})

    @classmethod
    def from_published(cls, arguments: Mapping[str, object]) -> Self:
        """The config of EDM's SongUNet; NCSN++, which is the same class with other arguments, is refused."""
        for name, value in PUBLISHED_FIXED.items():
            given = arguments.get(name, value)
            if (list(given) if isinstance(given, tuple) else given) != value:
                raise TcmError(f"{name}={given!r} makes this an NCSN++, which is not supported; DDPM++ has {value!r}")
        return cls.model_validate(
            {
                "channels": arguments.get("model_channels", 128),
                "channel_mult": listed(arguments, "channel_mult", (2, 2, 2)),
                "blocks": arguments.get("num_blocks", 4),
                "attention": listed(arguments, "attn_resolutions", (16,)),
                "noise_mult": arguments.get("channel_mult_noise", 1),
                "dropout": arguments.get("dropout", 0.0),
            }
        )

    def published_arguments(self) -> dict[str, object]:
        """The arguments of EDM's SongUNet."""
        own = {"model_type": "SongUNet", "channel_mult_noise": self.noise_mult}
        return super().published_arguments() | own | PUBLISHED_FIXED


def block_plans(config: DDPMppConfig, image_shape: ImageShape) -> tuple[list[BlockPlan], list[BlockPlan]]:
    """The blocks of the encoder and of the decoder."""
    encoder = encoder_plan(config, image_shape, image_shape[0], config.channels)
    return encoder, decoder_plan(config, image_shape, encoder, every_block_attends=False)


class DDPMpp(Network):
    """A U-Net of residual blocks with group normalisation, conditioned by adding the embedding to the activations."""

    def __init__(self, config: DDPMppConfig, image_shape: ImageShape, classes: int) -> None:
        super().__init__()
        self.classes, self.image_shape = classes, image_shape
        noise, embedding = config.channels * config.noise_mult, config.channels * 4
        self.embed_label = linear_layer(classes, noise) if classes else None
        self.embed_0 = linear_layer(noise, embedding)
        self.embed_1 = linear_layer(embedding, embedding)

        encoder, decoder = self.encoder_plan, self.decoder_plan = block_plans(config, image_shape)
        blocks = [plan for plan in encoder + decoder if plan.kind != "conv"]
        self.dropout = config.dropout
        self.dropout_shapes = tuple(level_shape(image_shape, plan.level, plan.channels_out) for plan in blocks)

        self.conv_in = conv_layer(image_shape[0], config.channels, 3)
        self.encoder = nn.ModuleList(Block(plan, embedding, config.dropout) for plan in encoder[1:])
        self.decoder = nn.ModuleList(Block(plan, embedding, config.dropout) for plan in decoder)
        width = decoder[-1].channels_out
        self.norm_out = norm_layer(width)
        self.conv_out = conv_layer(width, image_shape[0], 3, gain=1e-5)

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        """F_θ(x, c_noise)."""
        emb = positional_embedding(c_noise, self.embed_0.in_features)
        if self.embed_label is not None:
            emb = emb + self.embed_label(one_hot(condition, self.classes, emb))
        emb = F.silu(self.embed_1(F.silu(self.embed_0(emb))))

        x = self.conv_in(x.to(self.arithmetic or self.conv_in.weight.dtype))
        skips = [x]
        for index, block in enumerate(self.encoder):
            x = block(x, emb, masks, index)
            skips.append(x)
        for index, (plan, block) in enumerate(zip(self.decoder_plan, self.decoder, strict=True), len(self.encoder)):
            if plan.takes_skip:
                x = concatenated(x, skips.pop())
            x = block(x, emb, masks, index)
        return self.conv_out(F.silu(self.norm_out(x)))

    def published_names(self) -> dict[str, str]:
        """EDM's names."""
        full = resolution(self.image_shape, 0)
        outside = PUBLISHED_OUTSIDE | {
            "norm_out": f"dec.{full}x{full}_aux_norm",
            "conv_out": f"dec.{full}x{full}_aux_conv",
        }
        modules = published_names(self.image_shape, self.encoder_plan, self.decoder_plan, PUBLISHED_PARTS, outside)
        return translate(self.state_dict(), modules)

    def published_constants(self) -> dict[str, Tensor]:
        """The filter [1, 1] of each layer that resamples."""
        layers = [name.removesuffix(".weight") for name in self.published_names().values() if name.endswith("weight")]
        resampling = [layer for layer in layers if re.search(r"x\d+_(up|down)\.(skip|conv0)$", layer)]
        return {f"{layer}.resample_filter": torch.full((1, 1, 2, 2), 0.25) for layer in resampling}


class Block(nn.Module):
    """x ↦ (skip(x) + conv(dropout(silu(norm(conv(silu(norm(x))) + affine(emb))))))/√2, then attention."""

    def __init__(self, plan: BlockPlan, embedding: int, dropout: float) -> None:
        super().__init__()
        self.resample: Resample = plan.kind if plan.kind in ("up", "down") else "keep"
        self.dropout = dropout
        width_in, width = plan.channels_in, plan.channels_out
        self.norm_0 = norm_layer(width_in)
        self.conv_0 = conv_layer(width_in, width, 3)
        self.affine = linear_layer(embedding, width)
        self.norm_1 = norm_layer(width)
        self.conv_1 = conv_layer(width, width, 3, gain=1e-5)
        self.skip = conv_layer(width_in, width, 1) if width_in != width or self.resample != "keep" else None
        self.attention = Attention(width) if plan.attention else None

    def forward(self, x: Tensor, emb: Tensor, masks: Masks | None, index: int) -> Tensor:
        """The block's output; its dropout mask is the one of this index."""
        h = self.conv_0(resample(F.silu(self.norm_0(x)), self.resample))
        h = F.silu(self.norm_1(h + self.affine(emb)[:, :, None, None].to(h.dtype)))
        h = self.conv_1(drop(h, masks, index, self.dropout))
        x = resample(x, self.resample)
        x = scale_(h + (x if self.skip is None else self.skip(x)), sqrt(0.5))
        return x if self.attention is None else self.attention(x)


class Attention(nn.Module):
    """x ↦ (x + proj(attention(norm(x))))/√2 with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm_layer(channels)
        self.qkv = conv_layer(channels, 3 * channels, 1, gain=sqrt(0.2))
        self.proj = conv_layer(channels, channels, 1, gain=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Self-attention over all positions."""
        q, k, v = split_heads(self.qkv(self.norm(x)), heads=1)
        return scale_(x + self.proj(merge_heads(attend(q, k, v), x)), sqrt(0.5))


class Conv(nn.Conv2d):
    """A convolution in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """conv(x, w) + b."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return conv2d(x, self.weight.to(x.dtype), bias)


class GroupNorm(nn.GroupNorm):
    """Group normalisation in the precision of its input; its statistics are in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(x − mean)/std · w + b."""
        return group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Linear(nn.Linear):
    """A linear map of the embedding; in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """x wᵀ + b."""
        return linear_float32(x, self.weight, self.bias)


def positional_embedding(c_noise: Tensor, channels: int) -> Tensor:
    """sin and cos of c_noise (B,) at geometrically spaced frequencies from 1 to 1/10,000: (B, channels)."""
    phases = torch.outer(c_noise, torch.logspace(0, -4, channels // 2, device=c_noise.device))
    return torch.cat([phases.sin(), phases.cos()], dim=1)


def check_groups(config: UNetConfig, blocks: Iterable[BlockPlan]) -> None:
    """Refuse widths that `norm_layer` cannot divide into its groups."""
    for width in (width for block in blocks for width in (block.channels_in, block.channels_out)):
        if width < 4 or width % min(32, width // 4):
            raise TcmError(
                f"network.channels={config.channels} gives a layer of {width} channels, which group "
                f"normalisation cannot divide into {min(32, width // 4)} groups; use a multiple of 32"
            )


def norm_layer(channels: int) -> GroupNorm:
    """Normalisation in groups of at least four channels."""
    return GroupNorm(min(32, channels // 4), channels, eps=1e-6)


def conv_layer(channels_in: int, channels_out: int, kernel: int, gain: float = 1.0) -> Conv:
    """A convolution that keeps the size, initialised with this gain."""
    layer = Conv(channels_in, channels_out, kernel, padding=kernel // 2)
    _initialise(layer, gain)
    return layer


def linear_layer(features_in: int, features_out: int) -> Linear:
    """A linear map of the embedding."""
    layer = Linear(features_in, features_out)
    _initialise(layer, 1.0)
    return layer


def _initialise(layer: nn.Conv2d | nn.Linear, gain: float) -> None:
    nn.init.xavier_uniform_(layer.weight, gain=gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
