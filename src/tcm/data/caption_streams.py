"""Streams of captioned images: captions are encoded when they arrive, or were encoded ahead."""

import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Self

import numpy as np
import torch

from tcm.data.captions import SHOWN
from tcm.data.dataset import Pixels
from tcm.data.decode import BrokenImage
from tcm.data.streams import Sample, Stream
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.method.conditions import TextEmbeddings
from tcm.text.condition import Texts

MOST_LEFT_OUT = 0.1
"""The share of samples that may be broken or lack a caption."""
PATIENCE = 100
"""Samples to see before that share is judged."""


class CaptionStream(Stream):
    """A stream whose images are annotated with their captions, as an encoder reads them.

    Samples without a caption and broken images are left out and counted; too many are an error. What is left out
    depends on the files alone, so that a run resumes exactly. `stored` is the kind of the embeddings that the shards
    hold, if they do; those of another encoder are not used.
    """

    def __init__(self, inner: Stream, kind: Texts, stored: Texts | None = None):
        self.where, self.identity, self.shards, self.shape = inner.where, inner.identity, inner.shards, inner.shape
        self._inner, self._stored = inner, stored
        self._kind = Texts.of(kind.load_encoder(), kind.tokens, kind.prompts, kind.negative)
        self.uses_stored = stored == self._kind
        self._seen = self._left_out = 0
        null = self._kind.encode([])
        self._null = null.null_tokens.half(), null.null_mask

    @property
    def condition_kind(self) -> Texts:
        """Return the encoder's kind of texts."""
        return self._kind

    def with_channels(self, channels: int) -> Self:
        """Return this stream with its images converted to grey (1) or RGB (3)."""
        return type(self)(self._inner.with_channels(channels), self._kind, self._stored)

    def shard(self, number: int) -> Iterator[Sample]:
        """Yield the samples of a shard that have a caption."""
        for sample in self._inner.shard(number):
            self._seen += 1
            if sample.caption:
                yield sample
            else:
                self._count(f"{sample.name} has no caption")

    def decode(self, sample: Sample) -> Pixels:
        """Return a sample's pixels, checked against the stream's shape."""
        return self._inner.decode(sample)

    def leave_out(self, error: BrokenImage) -> None:
        """Count a broken image."""
        self._count(error.problem)

    def condition(self, samples: Sequence[Sample]) -> TextEmbeddings:
        """Return the embeddings of the samples' captions, in float16."""
        if self.uses_stored and all(sample.embedding is not None for sample in samples):
            return self._embeddings(samples)
        found = self._kind.load_encoder().encode(
            [sample.caption or "" for sample in samples], self._kind.tokens, warn=False
        )
        return TextEmbeddings(found.tokens.half(), found.mask, *self._null)

    def _embeddings(self, samples: Sequence[Sample]) -> TextEmbeddings:
        tokens = torch.zeros(len(samples), self._kind.tokens, self._kind.width, dtype=torch.float16)
        mask = torch.zeros(len(samples), self._kind.tokens, dtype=torch.bool)
        for row, sample in enumerate(samples):
            found = embedding_of(sample.embedding or b"", sample.name, self._kind)
            tokens[row, : len(found)] = found
            mask[row, : len(found)] = True
        return TextEmbeddings(tokens, mask, *self._null)

    def _count(self, problem: str) -> None:
        self._left_out += 1
        said = f"{self.where}: {self._left_out:,} of {self._seen:,} samples are left out; the last one: {problem}"
        if self._seen >= PATIENCE and self._left_out > MOST_LEFT_OUT * self._seen:
            raise TcmError(f"{said}; at most {MOST_LEFT_OUT:.0%} may be: clean the data")
        if str(self._left_out).strip("0") == "1":  # 1, 10, 100, …
            warnings.warn(said, TcmWarning, stacklevel=2)


def embedding_bytes(tokens: torch.Tensor, mask: torch.Tensor) -> bytes:
    """One caption's embedding as it is stored: the tokens that count, in float16, in numpy's format."""
    file = io.BytesIO()
    np.save(file, tokens[mask].half().numpy(), allow_pickle=False)
    return file.getvalue()


def embedding_of(data: bytes, name: str, kind: Texts) -> torch.Tensor:
    """The tokens of one caption, from what `embedding_bytes` wrote."""
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise TcmError(f"{name} has a damaged embedding ({error}); prepare the data again") from error
    if found.dtype != np.float16 or found.ndim != 2 or found.shape[1] != kind.width or len(found) > kind.tokens:
        raise TcmError(
            f"{name} has an embedding of shape {found.shape} and dtype {found.dtype}, but up to {kind.tokens} tokens "
            f"of width {kind.width} in float16 are expected; prepare the data again"
        )
    return torch.from_numpy(found)


def captioned(stream: Stream, kind: Texts, stored: Texts | None) -> CaptionStream:
    """The stream with its captions as the condition; an error if it has none."""
    first = list(islice((sample.caption for shard in range(stream.shards) for sample in stream.shard(shard)), SHOWN))
    captions = tuple(dict.fromkeys(caption for caption in first if caption))
    if not captions:
        raise TcmError(
            f"{stream.where} has no captions: its first samples have neither a .txt nor a .json with a caption, nor a "
            "column of texts; add them, or leave condition out"
        )
    return CaptionStream(stream, replace(kind, prompts=kind.prompts or captions), stored)
