"""Images as latents, encoded when they are read: batches on the device that trains, or a data set by index."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import torch

from tcm.data.dataset import Dataset, Indices, Pixels
from tcm.data.loader import BatchSource, LoadedBatch, Resume
from tcm.data.pixels import to_float
from tcm.foundation.devices import to_device
from tcm.text.autoencoders import Latents


def seen_by(dataset: Dataset, latents: Latents | None) -> Dataset:
    """The data set as a network sees it that takes these latents: encoded when it is read, unless it is already."""
    return dataset if latents is None or dataset.latents is not None else _ImagesAsLatents(dataset, latents)


class _ImagesAsLatents(Dataset):
    def __init__(self, dataset: Dataset, latents: Latents):
        super().__init__(dataset.count, latents.of_images(dataset.shape), dataset.annotations, dataset.skipped)
        self.latents, self._encode, self._images = latents, latents.encode, dataset

    def pixels(self, indices: Indices) -> Pixels:
        return cast(Pixels, self._encode(to_float(torch.from_numpy(self._images.pixels(indices)))).numpy())


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
