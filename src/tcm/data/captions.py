"""A text for each image: as it stands, or as a text encoder reads it."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tcm.data.dataset import Annotations, ClassLabels, Dataset, Indices
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition, ConditionKind, TextEmbeddings
from tcm.text.condition import UNREAD, Texts

AT_ONCE = 64
"""Captions that are encoded together: always the same ones, so that an embedding never depends on who asks for it."""
MOST_BYTES = 4 * 2**30
"""Embeddings that may be kept in memory."""
SHOWN = 16
"""Captions of the data that a model is shown with."""


def shown_captions(texts: Sequence[str]) -> tuple[str, ...]:
    """A few captions from all over the data, each once.

    >>> shown_captions(["cat", "dog"] * 50)
    ('cat', 'dog')
    """
    chosen = np.linspace(0, len(texts) - 1, min(SHOWN, len(texts))).astype(int)
    return tuple(dict.fromkeys(texts[index] for index in chosen.tolist()))


class Captions(Annotations):
    """A text for each image, which no encoder has read yet; perhaps a class too, which is then the condition."""

    def __init__(self, texts: Sequence[str], classes: ClassLabels | None = None):
        self._texts, self._classes = texts, classes

    @property
    def texts(self) -> Sequence[str]:
        return self._texts

    @property
    def classes(self) -> ClassLabels | None:
        return self._classes

    @property
    def kind(self) -> ConditionKind:
        """Return the classes, or texts by an unknown encoder."""
        return UNREAD if self.classes is None else self.classes.kind

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Indices) -> "Captions":
        classes = None if self.classes is None else self.classes.select(indices)
        return Captions([self.texts[index] for index in indices], classes)

    def condition(self, indices: Indices) -> Condition:
        if self.classes is None:
            UNREAD.load_encoder()  # an error that says what is missing
        assert self.classes is not None
        return self.classes.condition(indices)

    def content(self) -> bytes:
        classes = b"" if self.classes is None else self.classes.content()
        return classes + b"\0".join(text.encode("utf-8", "surrogatepass") for text in self.texts)


class EncodedCaptions(Annotations):
    """A text for each image, as an encoder reads it: in float16, in memory, encoded when it is first asked for."""

    def __init__(self, captions: Captions, kind: Texts):
        size = 2 * len(captions) * kind.tokens * kind.width
        if size > MOST_BYTES:
            raise TcmError(
                f"the embeddings of {len(captions):,} captions take {size / 2**30:.1f} GiB; write the images and the "
                "captions as shards (`tcm data prepare`) and read them as a stream, or prepare latents with "
                "--text-encoder, which stores the embeddings too"
            )
        encoder = kind.load_encoder()
        self.captions = captions
        self._kind = Texts.of(encoder, kind.tokens, shown_captions(captions.texts), kind.negative)
        empty = kind.encode([])
        self._null = TextEmbeddings(empty.tokens.half(), empty.mask, empty.null_tokens.half(), empty.null_mask)
        self._tokens: NDArray[np.float16] = np.empty((len(captions), kind.tokens, kind.width), np.float16)
        self._mask: NDArray[np.bool_] = np.empty((len(captions), kind.tokens), np.bool_)
        self._encoded: NDArray[np.bool_] = np.zeros(-(-len(captions) // AT_ONCE), np.bool_)

    @property
    def kind(self) -> Texts:
        """Return the encoder's kind of texts."""
        return self._kind

    @property
    def texts(self) -> Sequence[str]:
        return self.captions.texts

    @property
    def classes(self) -> ClassLabels | None:
        return self.captions.classes

    def __len__(self) -> int:
        return len(self.captions)

    def select(self, indices: Indices) -> "EncodedCaptions":
        return EncodedCaptions(self.captions.select(indices), self._kind)

    def condition(self, indices: Indices) -> TextEmbeddings:
        for chunk in np.unique(indices // AT_ONCE).tolist():
            if not self._encoded[chunk]:
                self._encode(chunk)
        null = self._null
        tokens, mask = torch.from_numpy(self._tokens[indices]), torch.from_numpy(self._mask[indices])
        return TextEmbeddings(tokens, mask, null.null_tokens, null.null_mask)

    def content(self) -> bytes:
        return self.captions.content() + self._kind.encoder_hash.encode()

    def _encode(self, chunk: int) -> None:
        rows = slice(chunk * AT_ONCE, (chunk + 1) * AT_ONCE)
        found = self._kind.load_encoder().encode(self.captions.texts[rows], self._kind.tokens, warn=False)
        self._tokens[rows], self._mask[rows] = found.tokens.half().numpy(), found.mask.numpy()
        self._encoded[chunk] = True


def read_by(dataset: Dataset, expected: ConditionKind | None) -> Dataset:
    """The data set with its captions as the `expected` encoder reads them; unchanged if no texts are expected."""
    if isinstance(expected, Texts) and isinstance(dataset.annotations, Captions):
        encoded = EncodedCaptions(dataset.annotations, expected)
        if not dataset.in_memory:  # processes will read it, none of which should load an encoder
            encoded.condition(np.arange(dataset.count))
        dataset.annotations = encoded
    return dataset
