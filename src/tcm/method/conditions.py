"""What an image depends on besides noise: a class, a text, or nothing (None).

A `Condition` holds the values of a batch; a `ConditionKind` is what a model takes, as its card keeps it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import derive_seed


class Condition(ABC):
    """The condition of each image of a batch."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select(self, rows: Tensor | slice) -> Self:
        """The conditions of these images."""

    @abstractmethod
    def keep(self, kept: Tensor) -> Self:
        """The condition where `kept` (B,) is true, the null condition elsewhere."""

    @abstractmethod
    def to(self, device: torch.device) -> Self: ...

    def null(self) -> Self:
        """The null condition for every image: what guidance leads away from."""
        return self.keep(torch.zeros(len(self), dtype=torch.bool))


@dataclass(frozen=True)
class Labels(Condition):
    """Class labels (B,); −1 is no class.

    >>> Labels(torch.tensor([3, 5])).keep(torch.tensor([True, False])).index
    tensor([ 3, -1])
    """

    index: Tensor

    def __len__(self) -> int:
        return self.index.shape[0]

    def select(self, rows: Tensor | slice) -> Self:
        return type(self)(self.index[rows])

    def keep(self, kept: Tensor) -> Self:
        return type(self)(torch.where(to_device(kept, self.index.device), self.index, -1))

    def to(self, device: torch.device) -> Self:
        return type(self)(to_device(self.index, device))


@dataclass(frozen=True)
class TextEmbeddings(Condition):
    """A text encoder's outputs (B, tokens, width) and which of them count (B, tokens).

    `null_tokens` (tokens, width) and `null_mask` (tokens,) are those of the text that stands for no text.
    """

    tokens: Tensor
    mask: Tensor
    null_tokens: Tensor
    null_mask: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, rows: Tensor | slice) -> Self:
        return type(self)(self.tokens[rows], self.mask[rows], self.null_tokens, self.null_mask)

    def keep(self, kept: Tensor) -> Self:
        kept = to_device(kept, self.tokens.device)
        tokens = torch.where(kept[:, None, None], self.tokens, self.null_tokens)
        mask = torch.where(kept[:, None], self.mask, self.null_mask)
        return type(self)(tokens, mask, self.null_tokens, self.null_mask)

    def to(self, device: torch.device) -> Self:
        parts = (self.tokens, self.mask, self.null_tokens, self.null_mask)
        return type(self)(*(to_device(part, device) for part in parts))


@dataclass(frozen=True)
class Classes:
    """What a class-conditional model takes: one of `count` classes.

    >>> Classes(10).spread(4).index.tolist(), Classes(3).spread(4).index.tolist()
    ([0, 2, 5, 7], [0, 1, 2, 0])
    """

    count: int
    kind: Literal["classes"] = "classes"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise TcmError(f"count={self.count}: a class condition needs at least one class; leave the condition out")

    def __str__(self) -> str:
        return f"{self.count} classes"

    def choose(self, choice: Sequence[int] | int, count: int) -> Labels:
        """What a user chose for `count` images: a label for each, or one for all."""
        chosen = torch.tensor([choice] * count if isinstance(choice, int) else list(choice), dtype=torch.long)
        if len(chosen) != count:
            raise TcmError(f"labels has {len(chosen)} entries for {count} images; give one per image, or one number")
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.count:
            raise TcmError(f"labels={choice} must lie between 0 and {self.count - 1}")
        return Labels(chosen)

    def draw(self, seeds: Sequence[int]) -> Labels:
        """A class for each image, from its seed."""
        return Labels(torch.tensor([derive_seed("class", seed) % self.count for seed in seeds], dtype=torch.long))

    def spread(self, count: int) -> Labels:
        """`count` labels from first to last, each once before any twice."""
        enough = self.count >= count
        return Labels(torch.tensor([i * self.count // count if enough else i % self.count for i in range(count)]))


ConditionKind = Classes
"""What a model can take; text joins here."""
