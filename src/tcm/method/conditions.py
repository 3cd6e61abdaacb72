"""What an image depends on besides noise: a class, a text, or nothing (None).

A `Condition` holds the values of a batch; a `ConditionKind` is what a model takes, as its card keeps it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import derive_seed

LISTED = 20
"""Names of classes in an error."""


class Condition(ABC):
    """The condition of each image of a batch."""

    graph_inputs: ClassVar[Mapping[str, str]] = {}
    """The fields that hold a row for each image, and what an exported graph calls them."""

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
        """The null condition for every image: what guidance steers away from."""
        return self.keep(torch.zeros(len(self), dtype=torch.bool))


@dataclass(frozen=True)
class Labels(Condition):
    """Class labels (B,); −1 is no class.

    >>> Labels(torch.tensor([3, 5])).keep(torch.tensor([True, False])).index
    tensor([ 3, -1])
    """

    index: Tensor

    graph_inputs: ClassVar[Mapping[str, str]] = {"index": "label"}

    def __len__(self) -> int:
        return self.index.shape[0]

    def select(self, rows: Tensor | slice) -> Self:
        return type(self)(self.index[rows])

    def keep(self, kept: Tensor) -> Self:
        return type(self)(torch.where(to_device(kept, self.index.device), self.index, -1))

    def to(self, device: torch.device) -> Self:
        return type(self)(to_device(self.index, device))


@dataclass(frozen=True)
class ClassMix(Condition):
    """A weight for each class (B, classes): with several, something between them; all zero is no class.

    >>> ClassMix(torch.tensor([[0.5, 0.5, 0.0]])).null().weights
    tensor([[0., 0., 0.]])
    """

    weights: Tensor

    graph_inputs: ClassVar[Mapping[str, str]] = {"weights": "classes"}

    def __len__(self) -> int:
        return self.weights.shape[0]

    def select(self, rows: Tensor | slice) -> Self:
        return type(self)(self.weights[rows])

    def keep(self, kept: Tensor) -> Self:
        return type(self)(self.weights * to_device(kept, self.weights.device)[:, None])

    def to(self, device: torch.device) -> Self:
        return type(self)(to_device(self.weights, device))


@dataclass(frozen=True)
class TextEmbeddings(Condition):
    """A text encoder's outputs (B, tokens, width) and which of them count (B, tokens).

    `null_tokens` (tokens, width) and `null_mask` (tokens,) are those of the text that stands for no text: the empty
    one, or a negative prompt. `texts` are what was encoded, if anyone will read it.
    """

    tokens: Tensor
    mask: Tensor
    null_tokens: Tensor
    null_mask: Tensor
    texts: tuple[str, ...] = ()

    graph_inputs: ClassVar[Mapping[str, str]] = {"tokens": "tokens", "mask": "mask"}

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, rows: Tensor | slice) -> Self:
        texts: tuple[str, ...] = ()
        if self.texts:
            chosen = rows.cpu() if isinstance(rows, Tensor) else rows
            texts = tuple(self.texts[row] for row in torch.arange(len(self))[chosen].tolist())
        return replace(self, tokens=self.tokens[rows], mask=self.mask[rows], texts=texts)

    def keep(self, kept: Tensor) -> Self:
        texts = tuple(
            text if one else "" for text, one in zip(self.texts, kept.tolist() if self.texts else (), strict=True)
        )
        kept = to_device(kept, self.tokens.device)
        tokens = torch.where(kept[:, None, None], self.tokens, self.null_tokens)
        mask = torch.where(kept[:, None], self.mask, self.null_mask)
        return replace(self, tokens=tokens, mask=mask, texts=texts)

    def to(self, device: torch.device) -> Self:
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            mask=to_device(self.mask, device),
            null_tokens=to_device(self.null_tokens, device),
            null_mask=to_device(self.null_mask, device),
        )

    def against(self, negative: Self) -> Self:
        """The same texts; the null condition is the first text of `negative`."""
        return replace(self, null_tokens=negative.tokens[0], null_mask=negative.mask[0])


ConditionChoice = int | str | Sequence[int | str]
"""What a user chose: one value for all images, or one for each."""


@dataclass(frozen=True)
class ConditionKind(ABC):
    """What a model is conditioned on. A kind is a frozen dataclass; a model's card holds its fields.

    In a card its field `kind` names the class: one of ours, an entry point of `tcm.parts`, or `module:Class`.
    """

    takes_prompts: ClassVar[bool] = False
    """Whether `choose` takes texts that a user writes freely."""

    @abstractmethod
    def __str__(self) -> str:
        """What the model takes, in a few words: `10 classes`."""

    @property
    def annotations(self) -> str:
        """What images come with in data of this kind, in words for errors."""
        return f"annotations ({self})"

    @abstractmethod
    def choose(self, choice: ConditionChoice, count: int) -> Condition:
        """What a user chose for `count` images."""

    @abstractmethod
    def draw(self, seeds: Sequence[int]) -> Condition:
        """A random condition for each image, from its seed."""

    @abstractmethod
    def spread(self, count: int) -> Condition:
        """`count` conditions, as different as can be, always the same."""

    def examples(self, most: int) -> Condition:
        """Up to `most` conditions, no two the same."""
        return self.spread(most)

    def dummy(self, count: int) -> Condition:
        """`count` conditions of the right shape, from which a network's cost is measured."""
        return self.spread(count)

    @abstractmethod
    def takes(self, condition: Condition) -> bool:
        """Whether a model of this kind can be given these conditions."""

    @abstractmethod
    def captions(self, condition: Condition) -> list[str]:
        """A few words on each image's condition."""

    def settle(self, found: "ConditionKind") -> "ConditionKind | None":
        """The kind of a model whose recipe asks for this one and whose data has `found`; None if they differ."""
        return found if found == self else None

    def with_negative(self, condition: Condition, negative: str) -> Condition:
        """The condition, with this text as what guidance steers away from."""
        raise TcmError(f"negative={negative!r} is for models that take texts, but this one takes {self}; leave it out")


@dataclass(frozen=True)
class Classes(ConditionKind):
    """One of `count` classes, with names or without; names make no difference to a model.

    >>> Classes(10).spread(4).index.tolist(), Classes(3).spread(4).index.tolist()
    ([0, 2, 5, 7], [0, 1, 2, 0])
    >>> Classes(2, ("cat", "dog")).choose(["dog", 0], 2).index.tolist(), Classes(2) == Classes(2, ("cat", "dog"))
    ([1, 0], True)
    """

    count: int
    names: tuple[str, ...] = field(default=(), compare=False)
    kind: Literal["classes"] = "classes"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise TcmError(f"count={self.count}: a class condition needs at least one class; leave the condition out")
        if len(self.names) not in (0, self.count):
            raise TcmError(f"names has {len(self.names)} entries for count={self.count} classes; name all or none")

    def __str__(self) -> str:
        return f"{self.count} classes"

    @property
    def annotations(self) -> str:
        return "classes"

    def choose(self, choice: ConditionChoice, count: int) -> Labels:
        """What a user chose for `count` images: a label or a class's name for each, or one for all."""
        if not isinstance(choice, int | str | Iterable):
            raise TcmError(f"labels={choice!r} is not a class; give a number, a name, or one of them per image")
        chosen = [choice] * count if isinstance(choice, int | str) else list(choice)
        if len(chosen) != count:
            raise TcmError(f"labels has {len(chosen)} entries for {count} images; give one per image, or one for all")
        return Labels(torch.tensor([self._index(one) for one in chosen], dtype=torch.long))

    def _index(self, chosen: int | str) -> int:
        if isinstance(chosen, str):
            named = [index for index, name in enumerate(self.names) if name == chosen]
            if len(named) == 1:
                return named[0]
            number = f"a number between 0 and {self.count - 1}"
            if named:
                raise TcmError(f"labels={chosen!r}: several classes have this name; give {number}")
            if not chosen.isdecimal():
                near = dict.fromkeys([*get_close_matches(chosen, self.names, LISTED), *self.names])
                names = [*list(near)[:LISTED], *(["…"] if len(near) > LISTED else []), f"or {number}"]
                raise TcmError(
                    f"labels={chosen!r}: none of the {self.count} classes has this name; give "
                    f"{', '.join(names) if near else number}"
                )
        if not 0 <= int(chosen) < self.count:
            raise TcmError(f"labels={chosen} must lie between 0 and {self.count - 1}")
        return int(chosen)

    def draw(self, seeds: Sequence[int]) -> Labels:
        return Labels(torch.tensor([derive_seed("class", seed) % self.count for seed in seeds], dtype=torch.long))

    def spread(self, count: int) -> Labels:
        """`count` labels from first to last, each once before any twice."""
        enough = self.count >= count
        return Labels(torch.tensor([i * self.count // count if enough else i % self.count for i in range(count)]))

    def examples(self, most: int) -> Labels:
        return self.spread(min(most, self.count))

    def takes(self, condition: Condition) -> bool:
        if isinstance(condition, ClassMix):
            return condition.weights.shape[1:] == (self.count,)
        return isinstance(condition, Labels) and bool(((condition.index >= -1) & (condition.index < self.count)).all())

    def captions(self, condition: Condition) -> list[str]:
        """A class's name, or `class 3`, or `50% cat, 50% dog`; nothing where there is no class."""
        if isinstance(condition, ClassMix):
            return [self._mix_caption(weights) for weights in condition.weights.tolist()]
        indices = condition.index.tolist() if isinstance(condition, Labels) else []
        return [self._caption(index) for index in indices]

    def _caption(self, index: int) -> str:
        if index < 0:
            return ""
        return self.names[index] if self.names else f"class {index}"

    def _mix_caption(self, weights: list[float]) -> str:
        return ", ".join(f"{weight:.0%} {self._caption(index)}" for index, weight in enumerate(weights) if weight)
