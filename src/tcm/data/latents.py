"""Batches of latents: a frozen autoencoder encodes each batch of images on the device that trains."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import torch

from tcm.data.loader import BatchSource, LoadedBatch, Resume
from tcm.data.pixels import to_float
from tcm.foundation.devices import to_device
from tcm.text.autoencoders import Latents


@dataclass(frozen=True)
class EncodedBatches:
    """The batches of a source, with the latents of their images (float16) in place of the pixels."""

    source: BatchSource
    latents: Latents
    device: torch.device

    def starting_at(self, step: int, resume: Resume | None = None) -> Iterator[LoadedBatch]:
        """Yield the batches of `step`, step + 1, ... without end."""
        return self._encoded(self.source.starting_at(step, resume))

    def _encoded(self, batches: Iterator[LoadedBatch]) -> Iterator[LoadedBatch]:
        with closing(cast(Generator[LoadedBatch], batches)):  # as all sources are: closing one ends its processes
            for loaded in batches:
                images = to_float(to_device(loaded.images, self.device))
                yield replace(loaded, images=self.latents.encode(images).cpu())
