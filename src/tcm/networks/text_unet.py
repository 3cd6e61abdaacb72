"""A DDPM++ that reads texts: its blocks attend to the tokens of a text encoder. For images of few pixels."""

from math import sqrt
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition, ConditionKind, TextEmbeddings
from tcm.method.preconditioning import Masks, Network
from tcm.networks.base import Blocks, ImageShape
from tcm.networks.ddpmpp import Block, check_groups, conv_layer, linear_layer, norm_layer, positional_embedding
from tcm.networks.layers import (
    BlockPlan,
    Levels,
    Resolutions,
    UNetConfig,
    decoder_plan,
    encoder_plan,
    level_shape,
    merge_heads,
    resolution,
)
from tcm.text.condition import Texts


class TextUNetConfig(UNetConfig):
    """DDPM++ with cross-attention to texts; the defaults have 3.7 M parameters for images of 32 × 32."""

    kind: Literal["text_unet"] = "text_unet"
    channels: PositiveInt = Field(default=16, multiple_of=2)
    channel_mult: Levels = (1, 2, 4, 8)
    blocks: Blocks = 1
    attention: Resolutions = Field(
        default=(8,), description="resolutions (of the longer side, after patching) with self-attention"
    )
    cross_attention: Resolutions = Field(
        default=(8, 4), description="resolutions (of the longer side, after patching) with attention to the text"
    )
    heads: PositiveInt = Field(default=4, description="heads of the attention to the text")
    patch: PositiveInt = Field(default=1, description="side of the squares of pixels that the network sees as one")

    published_mark: ClassVar[str | None] = None

    @classmethod
    def takes(cls, condition: ConditionKind | None) -> bool:
        return isinstance(condition, Texts) and bool(condition.encoder)

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "TextUNet":
        if not isinstance(condition, Texts):
            raise TcmError(
                f"condition={condition} does not fit network.kind='text_unet', which takes texts; use ddpmpp"
            )
        self.check(image_shape)
        return TextUNet(self, image_shape, condition.width)

    def patched(self, image_shape: ImageShape) -> ImageShape:
        """The shape of images whose squares of pixels have become channels."""
        channels, height, width = image_shape
        return channels * self.patch**2, height // self.patch, width // self.patch

    def check(self, image_shape: ImageShape) -> None:
        """Refuse images that the patches and levels do not divide, and widths that groups and heads do not."""
        for name, size in zip(("height", "width"), image_shape[1:], strict=True):
            if size % self.patch:
                raise TcmError(
                    f"image {name}={size} is not a multiple of network.patch={self.patch}; resize the images"
                )
        super().check(self.patched(image_shape))
        encoder, decoder = self.plans(image_shape)
        check_groups(self, encoder[1:] + decoder)
        for block in encoder[1:] + decoder:
            if block.channels_out % self.heads:
                raise TcmError(f"network.heads={self.heads} does not divide a layer of {block.channels_out} channels")

    def plans(self, image_shape: ImageShape) -> tuple[list[BlockPlan], list[BlockPlan]]:
        """The blocks of the encoder and of the decoder."""
        patched = self.patched(image_shape)
        encoder = encoder_plan(self, patched, patched[0], self.channels)
        return encoder, decoder_plan(self, patched, encoder, every_block_attends=False)


class TextUNet(Network):
    """A DDPM++ on patches; the mean of the tokens joins the noise embedding, and blocks attend to all of them."""

    def __init__(self, config: TextUNetConfig, image_shape: ImageShape, text_width: int) -> None:
        super().__init__()
        patched, embedding = config.patched(image_shape), config.channels * 4
        self.patch, self.dropout = config.patch, config.dropout
        self.embed_0 = linear_layer(config.channels, embedding)
        self.embed_1 = linear_layer(embedding, embedding)
        self.embed_text = linear_layer(text_width, embedding)
        self.norm_text = nn.LayerNorm(text_width)

        encoder, self.decoder_plan = config.plans(image_shape)
        plans = encoder[1:] + self.decoder_plan
        self.dropout_shapes = tuple(level_shape(patched, plan.level, plan.channels_out) for plan in plans)

        def block(plan: BlockPlan) -> TextBlock:
            reads = plan.kind in ("block", "in") and resolution(patched, plan.level) in config.cross_attention
            return TextBlock(plan, embedding, text_width if reads else 0, config)

        self.conv_in = conv_layer(patched[0], config.channels, 3)
        self.encoder = nn.ModuleList(block(plan) for plan in encoder[1:])
        self.decoder = nn.ModuleList(block(plan) for plan in self.decoder_plan)
        width = self.decoder_plan[-1].channels_out
        self.norm_out = norm_layer(width)
        self.conv_out = conv_layer(width, patched[0], 3, gain=1e-5)

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        """F_θ(x, c_noise); without a condition the network sees no text at all."""
        emb = positional_embedding(c_noise, self.embed_0.in_features)
        emb = self.embed_1(F.silu(self.embed_0(emb)))
        text = None
        if condition is not None:
            text = Text.of(condition, self.norm_text)
            emb = emb + self.embed_text(text.mean())
        emb = F.silu(emb)

        x = self.conv_in(F.pixel_unshuffle(x.to(self.arithmetic or self.conv_in.weight.dtype), self.patch))
        skips = [x]
        for index, block in enumerate(self.encoder):
            x = block(x, emb, text, masks, index)
            skips.append(x)
        for index, (plan, block) in enumerate(zip(self.decoder_plan, self.decoder, strict=True), len(self.encoder)):
            if plan.takes_skip:
                x = torch.cat([x, skips.pop()], dim=1)
            x = block(x, emb, text, masks, index)
        return F.pixel_shuffle(self.conv_out(F.silu(self.norm_out(x))), self.patch)


class Text:
    """The normalised tokens (B, L, width) of a batch, and which of them count (B, L)."""

    def __init__(self, tokens: Tensor, mask: Tensor) -> None:
        self.tokens, self.mask = tokens, mask

    @classmethod
    def of(cls, condition: Condition, norm: nn.LayerNorm) -> "Text":
        if not isinstance(condition, TextEmbeddings):
            raise TcmError(f"a {type(condition).__name__} condition does not fit this network; give it texts")
        return cls(norm(condition.tokens.to(norm.weight.dtype)), condition.mask)

    def mean(self) -> Tensor:
        """The mean of the tokens that count (B, width)."""
        weights = self.mask.to(self.tokens.dtype)[..., None]
        return (self.tokens * weights).sum(1) / weights.sum(1).clamp_min(1)


class TextBlock(nn.Module):
    """A block of DDPM++, then attention to the text, if it reads it."""

    def __init__(self, plan: BlockPlan, embedding: int, text_width: int, config: TextUNetConfig) -> None:
        super().__init__()
        self.block = Block(plan, embedding, config.dropout)
        self.reading = CrossAttention(plan.channels_out, text_width, config.heads) if text_width else None

    def forward(self, x: Tensor, emb: Tensor, text: Text | None, masks: Masks | None, index: int) -> Tensor:
        """The block's output; its dropout mask is the one of this index."""
        x = self.block(x, emb, masks, index)
        return x if self.reading is None or text is None else self.reading(x, text)


class CrossAttention(nn.Module):
    """x ↦ (x + proj(attention of norm(x) to the text))/√2."""

    def __init__(self, channels: int, text_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = norm_layer(channels)
        self.query = conv_layer(channels, channels, 1)
        self.key_value = nn.Linear(text_width, 2 * channels)
        self.proj = conv_layer(channels, channels, 1, gain=1e-5)

    def forward(self, x: Tensor, text: Text) -> Tensor:
        """Each position attends to the tokens that count."""
        B, channels, height, width = x.shape
        d = channels // self.heads
        q = self.query(self.norm(x)).reshape(B, self.heads, d, height * width).transpose(2, 3)
        k, v = self.key_value(text.tokens).to(q.dtype).reshape(B, -1, 2, self.heads, d).permute(2, 0, 3, 1, 4)
        # Written out: there are few tokens, and the fused kernels have no forward-mode derivative. q is scaled first,
        # because the product alone can overflow in fp16.
        logits = (q / sqrt(d)) @ k.transpose(2, 3)
        logits = logits.masked_fill(~text.mask[:, None, None, :], torch.finfo(logits.dtype).min)
        out = merge_heads(logits.softmax(-1) @ v, x)
        return (x + self.proj(out)) * sqrt(0.5)
