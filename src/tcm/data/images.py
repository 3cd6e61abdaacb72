"""A data set of image files that all have one shape."""

import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image

from tcm.data.caption_files import MOST_MISSING
from tcm.data.captions import Captions
from tcm.data.dataset import ArrayDataset, Broken, Dataset, Indices, Pixels, Stored
from tcm.data.decode import BrokenImage, channels_of, pixels_of
from tcm.data.pictures import Pictures
from tcm.foundation.errors import TcmError, TcmWarning


class ImageFiles(Dataset):
    """Image files that are decoded each time they are read; every one is checked against the first one's shape."""

    def __init__(
        self, pictures: Pictures, indices: Sequence[int], channels: int | None, skipped: Sequence[Broken] = ()
    ):
        first = pictures.picture(indices[0])
        self._pictures = pictures
        self._indices = indices
        self._convert = channels is not None
        self._first_name = pictures.names[indices[0]]
        annotations = pictures.annotations
        if annotations is not None:
            annotations = annotations.select(np.asarray(indices))
        shape = (channels or channels_of(first), first.height, first.width)
        super().__init__(len(indices), shape, annotations, skipped)

    def stored(self) -> Stored | None:
        """Return where the image files are."""
        return self._pictures.stored()

    def pixels(self, indices: Indices) -> Pixels:
        """Decode the images at `indices`."""
        images = np.empty((len(indices), *self.shape), np.uint8)
        for image, index in zip(images, indices, strict=True):
            file = self._indices[index]
            picture = self._pictures.picture(file)
            self._check(picture, self._pictures.names[file])
            image[:] = pixels_of(picture, self.shape[0])
        return images

    def _check(self, picture: Image.Image, name: str) -> None:
        channels, height, width = self.shape
        if picture.size != (width, height):
            raise TcmError(
                f"{name} is {picture.width}×{picture.height}, but {self._first_name} is {width}×{height}; "
                "bring all images to one size with `tcm data prepare`"
            )
        if not self._convert and channels_of(picture) != channels:
            kinds = {1: "grey", 3: "in colour"}
            raise TcmError(
                f"{name} is {kinds[channels_of(picture)]}, but {self._first_name} is {kinds[channels]}; "
                "pass channels=1 or 3 (--channels) to convert all images"
            )


def open_images(pictures: Pictures, channels: int | None, skip_broken: bool, memory_limit: int) -> Dataset:
    """Open image files as a data set: in memory if the pixels fit into `memory_limit` bytes, else decoded when read.

    Files that cannot be read are an error, or are left out with a warning that names them: with `skip_broken`, and
    where images with captions, which mostly come from the web, are read into memory.
    """
    captioned = isinstance(pictures.annotations, Captions)
    if not skip_broken:
        try:
            return _opened(pictures, channels, (), memory_limit)
        except BrokenImage:
            if not captioned:
                raise
    skipped = broken_files(pictures)
    count = len(pictures.names)
    if len(skipped) == count:
        raise TcmError(f"none of {count} images can be read; the first one: {skipped[0].reason}")
    if not skip_broken and len(skipped) > MOST_MISSING * count:
        raise TcmError(
            f"{len(skipped):,} of {count:,} images cannot be read, such as {skipped[0].name}; at most "
            f"{MOST_MISSING:.0%} may be left out: clean the data, or leave them out with `tcm data prepare "
            "--skip-broken`"
        )
    if skipped:
        shown = ", ".join(broken.name for broken in skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        warnings.warn(f"left out {len(skipped)} of {count} images: {shown}", TcmWarning, stacklevel=3)
    return _opened(pictures, channels, skipped, memory_limit)


def _opened(pictures: Pictures, channels: int | None, skipped: Sequence[Broken], memory_limit: int) -> Dataset:
    indices: Sequence[int] = range(len(pictures.names))
    if skipped:
        unusable = {broken.name for broken in skipped}
        indices = [index for index in indices if pictures.names[index] not in unusable]
    files = ImageFiles(pictures, indices, channels, skipped)
    if files.count * np.prod(files.shape, dtype=np.int64) > memory_limit:
        return files
    return in_memory(files)


def in_memory(dataset: Dataset) -> Dataset:
    """Return the same data set with all of its pixels in memory."""
    if dataset.in_memory:
        return dataset
    images = np.concatenate(list(dataset.chunks()))
    return ArrayDataset(images, dataset.annotations, dataset.skipped)


def broken_files(pictures: Pictures) -> list[Broken]:
    """Decode every file and return those that cannot be read, each with the reason."""
    broken = []
    for index, name in enumerate(pictures.names):
        try:
            pictures.picture(index)
        except BrokenImage as error:
            broken.append(Broken(name, error.problem))
    return broken
