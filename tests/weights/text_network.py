"""A network of text embeddings, as small as can be: what an exported graph must be able to take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tcm.method.conditions import Condition, ConditionChoice, ConditionKind, TextEmbeddings
from tcm.method.preconditioning import Masks, Network
from tcm.networks import ImageShape, NetworkConfig


@dataclass(frozen=True)
class Texts(ConditionKind):
    """Four tokens of `width` numbers, of which the first `n` count in text n."""

    width: int
    kind: Literal["text_network:Texts"] = "text_network:Texts"

    def __str__(self) -> str:
        return "texts"

    def choose(self, choice: ConditionChoice, count: int) -> TextEmbeddings:
        raise NotImplementedError

    def draw(self, seeds: Sequence[int]) -> TextEmbeddings:
        return self.spread(len(seeds))

    def spread(self, count: int) -> TextEmbeddings:
        tokens = torch.linspace(-1, 1, count * 4 * self.width).view(count, 4, self.width)
        mask = torch.arange(4) <= torch.arange(count)[:, None] % 4
        return TextEmbeddings(tokens, mask, torch.full((4, self.width), 0.5), torch.tensor([True, False, False, False]))

    def takes(self, condition: Condition) -> bool:
        return isinstance(condition, TextEmbeddings)

    def captions(self, condition: Condition) -> list[str]:
        return [""] * len(condition)


class TextConfig(NetworkConfig):
    """A convolution, and a linear map of the mean of the tokens that count."""

    kind: Literal["text_network:TextConfig"] = "text_network:TextConfig"
    frozen_batch: bool = False

    @classmethod
    def takes(cls, condition: ConditionKind | None) -> bool:
        return isinstance(condition, Texts)

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "TextNetwork":
        assert isinstance(condition, Texts)
        return TextNetwork(image_shape[0], condition.width, self.frozen_batch)


class TextNetwork(Network):
    """F = W x + V c; with `frozen_batch` written so that torch.export takes the number of images for a constant."""

    def __init__(self, channels: int, width: int, frozen_batch: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.text = nn.Linear(width, channels)
        self.frozen_batch = frozen_batch

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        assert isinstance(condition, TextEmbeddings)
        counted = condition.mask[..., None].to(x.dtype)
        text = self.text(((condition.tokens * counted).sum(1) / counted.sum(1)).to(x.dtype))
        return self.convolution(x) + text.view(len(x) if self.frozen_batch else x.shape[0], -1, 1, 1)
