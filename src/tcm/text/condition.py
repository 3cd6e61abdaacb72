"""Texts as what a model is conditioned on: which encoder reads them, and how many tokens it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import derive_seed
from tcm.method.conditions import Condition, ConditionChoice, ConditionKind, TextEmbeddings
from tcm.text.encoders import TextEncoder, load_encoder


@dataclass(frozen=True)
class Texts(ConditionKind):
    """A text, as a frozen `encoder` reads it: `tokens` vectors of `width` numbers.

    `encoder` says where the encoder is: a fetched one's name, a folder, or a hub id. `encoder_hash`, the SHA-256 of its
    weights and vocabulary, says which one it is. `prompts` are those that a model is shown with if nobody gives any.
    `negative` is the text that stands for no text, what guidance steers away from: empty, or a negative prompt.
    """

    encoder: str = field(compare=False)
    width: int
    tokens: int
    encoder_hash: str = ""
    prompts: tuple[str, ...] = field(default=(), compare=False)
    negative: str = field(default="", compare=False)
    kind: Literal["text"] = "text"
    takes_prompts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, number in (("width", self.width), ("tokens", self.tokens)):
            if number < 1 and self.encoder:
                raise TcmError(f"{name}={number} must be at least 1")

    @classmethod
    def of(
        cls, encoder: TextEncoder, tokens: int | None = None, prompts: Sequence[str] = (), negative: str = ""
    ) -> "Texts":
        """The kind of a model that is given this encoder's outputs, of all its tokens or the first few."""
        kept = encoder.longest if tokens is None else tokens
        return cls(encoder.reference, encoder.width, kept, encoder.sha256, tuple(prompts), negative)

    def __str__(self) -> str:
        if not self.encoder:
            return "captions"
        identity = f" ({self.encoder_hash[:8]})" if self.encoder_hash else ""
        return f"texts by {self.encoder}{identity}, {self.tokens} tokens of width {self.width}"

    @property
    def annotations(self) -> str:
        return "captions"

    def load_encoder(self) -> TextEncoder:
        """The encoder; an error if it is not the one that the model was trained with."""
        if not self.encoder:
            raise TcmError(
                "the captions need a text encoder; name one in the recipe, such as condition = { kind = 'text', "
                "encoder = 'minilm', width = 384, tokens = 32 }"
            )
        found = load_encoder(self.encoder)
        if self.encoder_hash not in ("", found.sha256):
            raise TcmError(
                f"the text encoder {self.encoder} has hash {found.sha256[:12]}…, but the model or the recipe "
                f"expects {self.encoder_hash[:12]}…; give the folder of that encoder"
            )
        if found.width != self.width or found.longest < self.tokens:
            raise TcmError(
                f"the text encoder {self.encoder} gives up to {found.longest} tokens of width {found.width}, but "
                f"condition asks for {self.tokens} of width {self.width}; correct condition.tokens and condition.width"
            )
        return found

    def choose(self, choice: ConditionChoice, count: int) -> TextEmbeddings:
        """The prompts of `count` images: one for each, or one for all."""
        given = [choice] * count if isinstance(choice, str | int) else list(choice)
        if not all(isinstance(text, str) for text in given):
            raise TcmError(f"prompts={choice!r} must be texts; give one for all images, or one for each")
        if len(given) != count:
            raise TcmError(f"prompts has {len(given)} texts for {count} images; give one per image, or one for all")
        return self.encode([str(text) for text in given])

    def encode(self, texts: Sequence[str]) -> TextEmbeddings:
        """The condition of these texts; each is encoded once."""
        different = list(dict.fromkeys(texts))
        numbers = {text: number for number, text in enumerate(different)}
        rows = torch.tensor([numbers[text] for text in texts], dtype=torch.long)
        encoder = self.load_encoder()
        encoded = encoder.encode(different, self.tokens).select(rows)
        return encoded.against(encoder.encode([self.negative], self.tokens)) if self.negative else encoded

    def warn_of_cuts(self, texts: Sequence[str]) -> None:
        """Warn of texts that are longer than `tokens`, once for all of them."""
        self.load_encoder().warn_of_cuts(texts, self.tokens)

    def draw(self, seeds: Sequence[int]) -> TextEmbeddings:
        """One of the kind's own prompts for each seed."""
        shown = self._shown()
        return self.encode([shown[derive_seed("prompt", seed) % len(shown)] for seed in seeds])

    def spread(self, count: int) -> TextEmbeddings:
        """The kind's own prompts in their order, each once before any twice."""
        shown = self._shown()
        return self.encode([shown[index % len(shown)] for index in range(count)])

    def examples(self, most: int) -> TextEmbeddings:
        return self.spread(min(most, len(self._shown())))

    def dummy(self, count: int) -> TextEmbeddings:
        """Zeros; no encoder is needed."""
        tokens, mask = torch.zeros(count, self.tokens, self.width), torch.ones(count, self.tokens, dtype=torch.bool)
        null_mask = torch.ones(self.tokens, dtype=torch.bool)
        return TextEmbeddings(tokens, mask, torch.zeros(self.tokens, self.width), null_mask)

    def takes(self, condition: Condition) -> bool:
        return isinstance(condition, TextEmbeddings) and condition.tokens.shape[1:] == (self.tokens, self.width)

    def captions(self, condition: Condition) -> list[str]:
        """The texts themselves."""
        return list(condition.texts) if isinstance(condition, TextEmbeddings) else []

    def settle(self, found: ConditionKind) -> "Texts | None":
        """An encoder that is not named by its hash can be any of this width; the recipe's prompts come first."""
        if not isinstance(found, Texts) or (found.width, found.tokens) != (self.width, self.tokens):
            return None
        if self.encoder_hash not in ("", found.encoder_hash):
            return None
        return replace(found, encoder=self.encoder, prompts=self.prompts or found.prompts, negative=self.negative)

    def with_negative(self, condition: Condition, negative: str) -> TextEmbeddings:
        assert isinstance(condition, TextEmbeddings), "this kind made it"
        return condition.against(self.encode([negative]))

    def _shown(self) -> tuple[str, ...]:
        return self.prompts or ("",)


UNREAD = Texts("", 0, 0)
"""The kind of captions for which no encoder has been named."""
