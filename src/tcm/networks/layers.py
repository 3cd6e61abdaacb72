"""What our U-Nets share: their plan, labels, dropout, attention, resampling, and how published ones are named."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Classes, ClassMix, Condition, ConditionKind, Labels
from tcm.method.preconditioning import Masks
from tcm.networks.base import Blocks, ImageShape, NetworkConfig
from tcm.networks.forward_mode import linear, scale_, scaled
from tcm.networks.unet_arguments import checked

Resample = Literal["keep", "up", "down"]


Levels = Annotated[tuple[int, ...], Field(min_length=1, max_length=32)]
Resolutions = Annotated[tuple[int, ...], Field(max_length=32)]


class UNetConfig(NetworkConfig):
    """The shape of a U-Net: level i has channels × channel_mult[i] channels at 1/2^i of the resolution."""

    channels: PositiveInt = Field(description="channels of the first level's unit")
    channel_mult: Levels = Field(description="channels of each level, in units of `channels`")
    blocks: Blocks = Field(description="residual blocks per level")
    attention: Resolutions = Field(default=(), description="resolutions (of the longer side) with self-attention")

    replays_dropout: ClassVar[bool] = True
    computes_in_half: ClassVar[bool] = True
    published_mark: ClassVar[str | None] = r"enc\.(?P<side>\d+)x(?P=side)_conv\.weight"

    def check(self, image_shape: ImageShape) -> None:
        """Refuse images that the levels do not divide."""
        step = 2 ** (len(self.channel_mult) - 1)
        for name, size in zip(("height", "width"), image_shape[1:], strict=True):
            if size < 1 or size % step:
                raise TcmError(
                    f"image {name}={size} is not a multiple of {step}, which the {len(self.channel_mult)} levels of "
                    f"channel_mult={list(self.channel_mult)} need; resize the images or use fewer levels"
                )

    @classmethod
    def check_published(cls, arguments: Mapping[str, object]) -> dict[str, object]:
        return checked(arguments)

    @classmethod
    def published_left_out(cls, weights: Mapping[str, Tensor]) -> dict[str, str]:
        reasons = {}
        for name, tensor in weights.items():
            if "map_augment." in name:
                reasons[name] = "conditions on augmentations, which are not used here"
            elif name.endswith("resample_filter"):
                if tensor.numel() != 4 or not torch.allclose(tensor.float(), torch.full_like(tensor.float(), 0.25)):
                    raise TcmError(f"{name} is not the filter [1, 1]; NCSN++ and other filters are not supported")
                reasons[name] = "the constant filter [1, 1]"
        return reasons

    def published_arguments(self) -> dict[str, object]:
        """What the reference's U-Nets have in common."""
        return {
            "model_channels": self.channels,
            "channel_mult": list(self.channel_mult),
            "num_blocks": self.blocks,
            "attn_resolutions": list(self.attention),
            "dropout": self.dropout,
        }


@dataclass(frozen=True)
class BlockPlan:
    """One block of a U-Net: the input convolution of the encoder is the block of kind "conv"."""

    kind: Literal["conv", "down", "up", "in", "block"]
    level: int
    index: int
    channels_in: int
    channels_out: int
    attention: bool
    takes_skip: bool = False


def encoder_plan(
    config: UNetConfig, image_shape: ImageShape, input_channels: int, first_channels: int
) -> list[BlockPlan]:
    """The encoder's blocks, in order: a convolution or a halving, then the level's blocks."""
    plan = [BlockPlan("conv", 0, 0, input_channels, first_channels, False)]
    for level, mult in enumerate(config.channel_mult):
        if level:
            plan.append(BlockPlan("down", level, 0, plan[-1].channels_out, plan[-1].channels_out, False))
        attention = resolution(image_shape, level) in config.attention
        for index in range(config.blocks):
            plan.append(BlockPlan("block", level, index, plan[-1].channels_out, config.channels * mult, attention))
    return plan


def decoder_plan(
    config: UNetConfig, image_shape: ImageShape, encoder: list[BlockPlan], every_block_attends: bool
) -> list[BlockPlan]:
    """The decoder's blocks, in order: two blocks at the lowest level or a doubling, then the level's blocks.

    A block that takes a skip connection takes the output of one more of the encoder's blocks, last first.
    """
    skips = [block.channels_out for block in encoder]
    lowest = len(config.channel_mult) - 1
    width = skips[-1]
    plan = [BlockPlan("in", lowest, 0, width, width, True), BlockPlan("in", lowest, 1, width, width, False)]
    for level in range(lowest, -1, -1):
        if level < lowest:
            plan.append(BlockPlan("up", level, 0, width, width, False))
        for index in range(config.blocks + 1):
            attends = resolution(image_shape, level) in config.attention
            attention = attends and (every_block_attends or index == config.blocks)
            out = config.channels * config.channel_mult[level]
            plan.append(BlockPlan("block", level, index, width + skips.pop(), out, attention, True))
            width = out
    return plan


def resolution(image_shape: ImageShape, level: int) -> int:
    """The longer side at a level."""
    return max(image_shape[1:]) >> level


def level_shape(image_shape: ImageShape, level: int, channels: int) -> ImageShape:
    """The shape of the activations of a level."""
    return channels, image_shape[1] >> level, image_shape[2] >> level


def class_count(condition: ConditionKind | None) -> int:
    """The number of classes that a network is built for, 0 for none."""
    if isinstance(condition, Classes | None):
        return 0 if condition is None else condition.count
    raise TcmError(f"condition={condition} does not fit this network, which takes class labels; use another network")


def one_hot(condition: Condition | None, count: int, like: Tensor) -> Tensor:
    """Labels (B,) as unit vectors times √count, so that their mean square is 1; no label (−1) is zero.

    A mix is the weighted sum of the vectors of its classes.
    """
    if isinstance(condition, ClassMix):
        return condition.weights.to(like) * count**0.5
    rows = torch.zeros(like.shape[0], count, device=like.device, dtype=like.dtype)
    if condition is None:
        return rows
    if not isinstance(condition, Labels):
        raise TcmError(f"a {type(condition).__name__} condition does not fit this network; give it class labels")
    known = (condition.index >= 0).to(like.dtype)
    return rows.scatter(1, condition.index.clamp_min(0)[:, None], (known * count**0.5)[:, None])


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x wᵀ + b in float32, under autocast too, as EDM and EDM2 embed t: a pair's times differ by one in a thousand."""
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return linear(x.float(), weight.float(), None if bias is None else bias.float())


def drop(x: Tensor, masks: Masks | None, index: int | None, rate: float) -> Tensor:
    """Dropout with the mask of this index; the mask alone is kept for the backward pass."""
    if masks is None or index is None:
        return x
    return scale_(scaled(x, masks[index]), 1 / (1 - rate))


def split_heads(qkv: Tensor, heads: int) -> Tensor:
    """Queries, keys and values (3, B, heads, positions, d) from the channels (heads, d, 3) of images (B, C, H, W).

    They are copied so that each vector is contiguous. Torch's fused attention kernels need that, and without it torch
    silently falls back to a kernel that holds all weights in memory.
    """
    B, channels, height, width = qkv.shape
    parts = qkv.reshape(B, heads, channels // (3 * heads), 3, height * width)
    return parts.permute(3, 0, 1, 4, 2).contiguous()


def merge_heads(out: Tensor, like: Tensor) -> Tensor:
    """The result of `attend` as images of the shape of `like`, with channels (heads, d)."""
    return out.transpose(2, 3).reshape(like.shape)


def resample(x: Tensor, mode: Resample) -> Tensor:
    """Halve by averaging 2 × 2 pixels, double by repeating them: the filter [1, 1] of EDM and EDM2."""
    # On a CPU faster than avg_pool2d and interpolate, forward and backward (docs/performance.md).
    match mode:
        case "keep":
            return x
        case "down":
            rows = torch.lerp(x[:, :, 0::2], x[:, :, 1::2], 0.5)
            return torch.lerp(rows[..., 0::2], rows[..., 1::2], 0.5)
        case "up":
            rows = torch.stack((x, x), dim=4).flatten(3)
            return torch.stack((rows, rows), dim=3).flatten(2, 3)


def published_names(
    image_shape: ImageShape,
    encoder: list[BlockPlan],
    decoder: list[BlockPlan],
    parts: Mapping[str, str],
    outside: Mapping[str, str],
) -> dict[str, str]:
    """Our module ↦ the reference's: those of the blocks by their `parts`, and those `outside` the blocks."""
    full = resolution(image_shape, 0)
    names = {**outside, "conv_in": f"enc.{full}x{full}_conv"}
    for ours, theirs, blocks in (("encoder", "enc", encoder[1:]), ("decoder", "dec", decoder)):
        for index, plan in enumerate(blocks):
            side = resolution(image_shape, plan.level)
            number = plan.index if plan.kind in ("in", "block") else ""
            block = f"{theirs}.{side}x{side}_{plan.kind}{number}"
            names |= {f"{ours}.{index}.{part}": f"{block}.{other}" for part, other in parts.items()}
    return names


def translate(names: Iterable[str], modules: Mapping[str, str]) -> dict[str, str]:
    """Our tensor's name ↦ the reference's, by the modules that hold them."""

    def other(name: str) -> str:
        if name in modules:
            return modules[name]
        module, _, leaf = name.rpartition(".")
        return f"{modules[module]}.{leaf}"

    return {name: other(name) for name in names}


def listed(arguments: Mapping[str, object], name: str, default: Sequence[int]) -> tuple[int, ...]:
    """A list among the reference's constructor arguments."""
    return tuple(cast(Sequence[int], arguments.get(name, default)))
