"""EDM2: a magnitude-preserving U-Net. 280.2 M parameters (S) at 192 channels, 1119.3 M (XL) at 384."""

from collections.abc import Mapping
from math import prod, sqrt
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition, ConditionKind
from tcm.method.preconditioning import Masks, Network
from tcm.networks.base import Blocks, ImageShape
from tcm.networks.forward_mode import attend, concatenated, conv2d, scale_, scaled
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

CHANNELS_PER_HEAD = 64
LABEL_BALANCE, SKIP_BALANCE, RESIDUAL_BALANCE, ATTENTION_BALANCE = 0.5, 0.5, 0.3, 0.3
CLIP = 256.0

PUBLISHED_PARTS = {
    "skip": "conv_skip",
    "conv_0": "conv_res0",
    "affine": "emb_linear",
    "affine_gain": "emb_gain",
    "conv_1": "conv_res1",
    "attention.qkv": "attn_qkv",
    "attention.proj": "attn_proj",
}
PUBLISHED_OUTSIDE = {
    "embed_fourier": "emb_fourier",
    "embed_noise": "emb_noise",
    "embed_label": "emb_label",
    "conv_out": "out_conv",
    "gain_out": "out_gain",
}


class EDM2Config(UNetConfig):
    """EDM2; the defaults are those of EDM2-S for ImageNet-64."""

    kind: Literal["edm2"] = "edm2"
    channels: PositiveInt = 192
    channel_mult: Levels = (1, 2, 3, 4)
    blocks: Blocks = 3
    attention: Resolutions = Field(
        default=(16, 8), description="resolutions (of the longer side) with self-attention, at 64 channels or more"
    )
    dropout_up_to: int = Field(default=16, gt=0, description="highest resolution at which activations are dropped")

    builds_from_values: ClassVar[bool] = True
    published_types: ClassVar[tuple[str, ...]] = ("UNet", "EDM2UNet")
    published_defaults: ClassVar[Mapping[str, object]] = {
        "model_channels": 192,
        "channel_mult": [1, 2, 3, 4],
        "num_blocks": 3,
        "dropout": 0.0,
    }

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "EDM2":
        self.check(image_shape)
        return EDM2(self, image_shape, class_count(condition))

    def check(self, image_shape: ImageShape) -> None:
        """Refuse images that the levels do not divide, and widths that the heads of attention do not."""
        super().check(image_shape)
        encoder, decoder = block_plans(self, image_shape)
        for block in encoder[1:] + decoder:
            heads = block.channels_out // CHANNELS_PER_HEAD
            if block.attention and block.channels_out % max(1, heads):
                raise TcmError(
                    f"network.channels={self.channels} gives an attention layer of {block.channels_out} channels, "
                    f"which its {heads} heads do not divide; use a multiple of {CHANNELS_PER_HEAD}"
                )

    @classmethod
    def check_published(cls, arguments: Mapping[str, object]) -> dict[str, object]:
        found = super().check_published(arguments)
        if "channel_mult_noise" in found:
            raise TcmError(f"channel_mult_noise={found['channel_mult_noise']} is not supported for EDM2")
        return found

    @classmethod
    def infer_published(cls, weights: Mapping[str, Tensor]) -> dict[str, object] | None:
        return infer(weights, width="conv_res1", attention="attn_qkv", one_more_input=True)

    @classmethod
    def from_published(cls, arguments: Mapping[str, object]) -> Self:
        """The config of EDM2's UNet."""
        return cls.model_validate(
            {
                "channels": arguments.get("model_channels", 192),
                "channel_mult": listed(arguments, "channel_mult", (1, 2, 3, 4)),
                "blocks": arguments.get("num_blocks", 3),
                "attention": listed(arguments, "attn_resolutions", (16, 8)),
                "dropout": arguments.get("dropout", 0.0),
                "dropout_up_to": max(listed(arguments, "dout_resolutions", (16,))),
            }
        )

    def published_arguments(self) -> dict[str, object]:
        """The arguments of EDM2's UNet."""
        drops_at = [self.dropout_up_to >> level for level in range(self.dropout_up_to.bit_length())]
        return super().published_arguments() | {"model_type": "EDM2UNet", "dout_resolutions": drops_at}


def block_plans(config: EDM2Config, image_shape: ImageShape) -> tuple[list[BlockPlan], list[BlockPlan]]:
    """The blocks of the encoder and of the decoder."""
    # One more input channel, of ones, takes the place of biases.
    encoder = encoder_plan(config, image_shape, image_shape[0] + 1, config.channels * config.channel_mult[0])
    return encoder, decoder_plan(config, image_shape, encoder, every_block_attends=True)


class EDM2(Network):
    """A U-Net whose activations, weights and updates keep their magnitudes by construction."""

    def __init__(self, config: EDM2Config, image_shape: ImageShape, classes: int) -> None:
        super().__init__()
        self.classes, self.image_shape = classes, image_shape
        noise, embedding = config.channels * config.channel_mult[0], config.channels * max(config.channel_mult)
        self.embed_fourier = FourierFeatures(noise)
        self.embed_noise = MPLinear(noise, embedding)
        self.embed_label = MPLinear(classes, embedding) if classes else None

        encoder, decoder = self.encoder_plan, self.decoder_plan = block_plans(config, image_shape)
        blocks = [plan for plan in encoder + decoder if plan.kind != "conv"]
        dropping = [plan for plan in blocks if resolution(image_shape, plan.level) <= config.dropout_up_to]
        self.dropout = config.dropout
        self.dropout_shapes = tuple(level_shape(image_shape, plan.level, plan.channels_out) for plan in dropping)
        masks = {id(plan): index for index, plan in enumerate(dropping)}

        def block(plan: BlockPlan, side: Literal["encoder", "decoder"]) -> Block:
            return Block(plan, side, embedding, config.dropout, masks.get(id(plan)))

        self.conv_in = MPConv(image_shape[0] + 1, noise, 3)
        self.encoder = nn.ModuleList(block(plan, "encoder") for plan in encoder[1:])
        self.decoder = nn.ModuleList(block(plan, "decoder") for plan in decoder)
        self.conv_out = MPConv(decoder[-1].channels_out, image_shape[0], 3)
        self.gain_out = nn.Parameter(torch.zeros([]))

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        """F_θ(x, c_noise)."""
        emb = self.embed_noise(self.embed_fourier(c_noise))
        if self.embed_label is not None:
            emb = mp_sum(emb, self.embed_label(one_hot(condition, self.classes, emb)), LABEL_BALANCE)
        emb = mp_silu(emb)

        x = x.to(self.arithmetic or self.conv_in.weight.dtype)
        x = self.conv_in(torch.cat([x, torch.ones_like(x[:, :1])], dim=1))
        skips = [x]
        for block in self.encoder:
            x = block(x, emb, masks)
            skips.append(x)
        for plan, block in zip(self.decoder_plan, self.decoder, strict=True):
            if plan.takes_skip:
                x = mp_cat(x, skips.pop(), SKIP_BALANCE)
            x = block(x, emb, masks)
        return self.conv_out(x, self.gain_out)

    def published_names(self) -> dict[str, str]:
        """EDM2's names."""
        modules = published_names(
            self.image_shape, self.encoder_plan, self.decoder_plan, PUBLISHED_PARTS, PUBLISHED_OUTSIDE
        )
        return translate(self.state_dict(), modules)

    @torch.no_grad()
    def normalize_weights(self) -> None:
        """Write every weight back at unit magnitude, so that the learning rate keeps its meaning (EDM2 Sec. 2.3)."""
        for module in self.modules():
            if isinstance(module, MPConv | MPLinear):
                module.weight.copy_(normalize(module.weight, dims=tuple(range(1, module.weight.ndim))))


class Block(nn.Module):
    """A residual block: magnitude-preserving sums of x and its residual branch, then of x and its attention."""

    def __init__(
        self,
        plan: BlockPlan,
        side: Literal["encoder", "decoder"],
        embedding: int,
        dropout: float,
        mask_index: int | None,
    ) -> None:
        super().__init__()
        self.normalises = side == "encoder"
        self.resample: Resample = plan.kind if plan.kind in ("up", "down") else "keep"
        self.dropout, self.mask_index = dropout, mask_index
        width_in, width = plan.channels_in, plan.channels_out
        self.skip = MPConv(width_in, width, 1) if width_in != width else None
        self.conv_0 = MPConv(width if side == "encoder" else width_in, width, 3)
        self.affine = MPLinear(embedding, width)
        self.affine_gain = nn.Parameter(torch.zeros([]))
        self.conv_1 = MPConv(width, width, 3)
        heads = width // CHANNELS_PER_HEAD
        self.attention = Attention(width, heads) if plan.attention and heads else None

    def forward(self, x: Tensor, emb: Tensor, masks: Masks | None) -> Tensor:
        x = resample(x, self.resample)
        if self.normalises:
            x = normalize(x if self.skip is None else self.skip(x), dims=(1,))
        h = self.conv_0(mp_silu(x))
        h = mp_silu(h * (self.affine(emb, self.affine_gain) + 1)[:, :, None, None].to(h.dtype))
        h = self.conv_1(drop(h, masks, self.mask_index, self.dropout))
        if not self.normalises and self.skip is not None:
            x = self.skip(x)
        x = mp_sum(x, h, RESIDUAL_BALANCE)
        if self.attention is not None:
            x = mp_sum(x, self.attention(x), ATTENTION_BALANCE)
        return x.clamp(-CLIP, CLIP)


class Attention(nn.Module):
    """Self-attention with queries, keys and values normalised per head."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = MPConv(channels, 3 * channels, 1)
        self.proj = MPConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Self-attention over all positions."""
        q, k, v = normalize(split_heads(self.qkv(x), self.heads), dims=(-1,))
        return self.proj(merge_heads(attend(q, k, v), x))


class MPConv(nn.Module):
    """A convolution without bias, whose weight is normalised at each use (EDM2 Eq. 66)."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels_out, channels_in, kernel, kernel))

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """conv(x, gain w/‖w‖)."""
        return conv2d(x, unit_weight(self.weight, gain).to(x.dtype))


class MPLinear(nn.Module):
    """A linear map of the embedding, without bias, whose weight is normalised at each use; in float32."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features_out, features_in))

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """x (gain w/‖w‖)ᵀ."""
        return linear_float32(x, unit_weight(self.weight, gain))


class FourierFeatures(nn.Module):
    """√2 cos(2π(f c_noise + φ)) at random frequencies f and phases φ, which are part of the model (EDM2 Eq. 75)."""

    freqs: Tensor
    phases: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 2 * torch.pi * torch.randn(channels))
        self.register_buffer("phases", 2 * torch.pi * torch.rand(channels))

    def forward(self, c_noise: Tensor) -> Tensor:
        """The features, (B, channels)."""
        return sqrt(2) * torch.cos(torch.outer(c_noise, self.freqs) + self.phases)


def magnitude(x: Tensor, dims: tuple[int, ...], eps: float = 1e-4) -> Tensor:
    """The root mean square of x over `dims`, in float32 and a little above zero."""
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32)
    return torch.add(eps, norm, alpha=1 / sqrt(prod([x.shape[dim] for dim in dims])))


def normalize(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x divided by its root mean square over `dims`."""
    return x * (1 / magnitude(x, dims)).to(x.dtype)


def unit_weight(weight: Tensor, gain: Tensor | float) -> Tensor:
    """The weight that a layer computes with: each output's row normalised to length `gain`."""
    # One factor per row: one pass over the weight instead of two, and no division in the backward pass.
    scale = gain / (magnitude(weight, tuple(range(1, weight.ndim))) * sqrt(weight[0].numel()))
    return weight * scale.to(weight.dtype)


def mp_silu(x: Tensor) -> Tensor:
    """silu(x)/0.596, which keeps the magnitude of a normal x (EDM2 Eq. 81)."""
    return scale_(F.silu(x), 1 / 0.596)


def mp_sum(a: Tensor, b: Tensor, t: float) -> Tensor:
    """((1 − t) a + t b)/√((1 − t)² + t²) (EDM2 Eq. 88)."""
    return scale_(torch.lerp(a, b, t), 1 / sqrt((1 - t) ** 2 + t**2))


def mp_cat(a: Tensor, b: Tensor, t: float) -> Tensor:
    """The channels of a and b, with weights by which each contributes (1 − t) : t (EDM2 Eq. 103)."""
    n_a, n_b = a.shape[1], b.shape[1]
    scale = sqrt((n_a + n_b) / ((1 - t) ** 2 + t**2))
    return concatenated(scaled(a, scale * (1 - t) / sqrt(n_a)), scaled(b, scale * t / sqrt(n_b)))
