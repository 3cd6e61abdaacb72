"""Data that come one after another: WebDataset shards (also from URLs) and Hugging Face streaming.

A stream cannot jump to a step, so that it has a position instead: a small JSON-able value that comes with every batch
(`LoadedBatch.resume`) and from which reading goes on exactly there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from tcm.data.dataset import Labels, Pixels
from tcm.data.decode import EXTENSIONS, channels_of, decode_picture, pixels_of
from tcm.data.huggingface import encoded_bytes, image_column, label_column, load_rows, without_decoding
from tcm.data.loader import LoadedBatch, as_batch
from tcm.data.opening import HUB, class_names_beside
from tcm.data.order import check_seed, flips, permutation, rank_positions
from tcm.data.pictures import TAR_ERRORS, class_number
from tcm.errors import TcmError


@dataclass(frozen=True)
class Sample:
    """One image, not yet decoded."""

    name: str
    data: bytes
    label: int | None


class Stream(ABC):
    """Images in the order in which they come. All have the first one's shape; no class names means no labels."""

    where: str

    def __init__(self, channels: int | None, class_names: tuple[str, ...]):
        first = next((sample for sample, _ in self.samples(0, 0, None)), None)
        if first is None:
            raise TcmError(f"{self.where} holds no images; give a stream that does")
        if first.label is not None and not class_names:
            raise TcmError(
                f"{self.where} has labels, but a stream cannot tell how many classes there are; pass class_names"
            )
        picture = decode_picture(first.data, first.name)
        self.shape = (channels or channels_of(picture), picture.height, picture.width)
        self.class_names = class_names if first.label is not None else ()
        self._convert = channels is not None

    @property
    def classes(self) -> int:
        """Return the number of classes; 0 means that there are no labels."""
        return len(self.class_names)

    @abstractmethod
    def samples(self, seed: int, epoch: int, start: Any) -> Iterator[tuple[Sample, Any]]:
        """Yield an epoch's samples from the place `start` (None: its beginning), each with the place after it."""

    def decode(self, sample: Sample) -> Pixels:
        """Return a sample's pixels, checked against the stream's shape."""
        picture = decode_picture(sample.data, sample.name)
        channels, height, width = self.shape
        if picture.size != (width, height) or (not self._convert and channels_of(picture) != channels):
            raise TcmError(
                f"{sample.name} is {picture.width}×{picture.height} with {channels_of(picture)} channels, but the "
                f"stream began with {width}×{height} and {channels}; bring all to one form with `tcm data prepare`"
            )
        return pixels_of(picture, channels)


class ShardStream(Stream):
    """WebDataset shards; their order is shuffled anew in each epoch. Paths or URLs, as webdataset opens them."""

    def __init__(self, shards: list[str], channels: int | None, class_names: tuple[str, ...]):
        if any(shard.startswith("pipe:") for shard in shards):
            raise TcmError("shards that start with pipe: would run a command; give paths or URLs")
        self._shards = shards
        self.where = shards[0]
        super().__init__(channels, class_names)

    def samples(self, seed: int, epoch: int, start: Any) -> Iterator[tuple[Sample, Any]]:
        """Yield an epoch's samples; a place is [number of the shard in this epoch, number of the sample in it]."""
        first_shard, first_sample = start or (0, 0)
        order = permutation(len(self._shards), seed, epoch)
        for number in range(first_shard, len(self._shards)):
            skipped = first_sample if number == first_shard else 0
            numbered = enumerate(_shard_samples(self._shards[order[number]]))
            for index, sample in islice(numbered, skipped, None):
                yield sample, [number, index + 1]


class RowStream(Stream):
    """A Hugging Face data set, streamed; a place is what its library calls the state."""

    def __init__(self, where: str, split: str, channels: int | None, class_names: tuple[str, ...]):
        self.where = where
        rows = load_rows(where, split, streaming=True)
        if rows.features is None:
            raise TcmError(f"{where} does not say what its columns are; download it and open it without streaming")
        column = label_column(rows)
        self._image = image_column(rows, where)
        self._label = column[0] if column else None
        self._rows = without_decoding(rows, self._image)
        super().__init__(channels, class_names or (column[1] if column else ()))

    def samples(self, seed: int, epoch: int, start: Any) -> Iterator[tuple[Sample, Any]]:
        """Yield an epoch's samples, in the data set's own order in every epoch."""
        # A new object each time: the library keeps the state of the latest iteration in it.
        rows = self._rows.select_columns([name for name in (self._image, self._label) if name is not None])
        if start is not None:
            rows.load_state_dict(start)
        for row in rows:
            state = rows.state_dict()
            name = f"{self.where} row at {state}"
            label = None if self._label is None else int(row[self._label])
            yield Sample(name, encoded_bytes(row[self._image], name), label), state


class StreamBatches:
    """A stream's batches, shuffled within windows of `window` samples by a pure function of (seed, epoch, window).

    Every process reads the whole stream and decodes its own share of each batch, so that the whole batch does not
    depend on their number. `workers` are threads that decode.

    >>> batches = StreamBatches(open_stream("shards/"), seed=0, batch=128)  # doctest: +SKIP
    >>> for loaded in batches.starting_at(step, resume=saved): saved = loaded.resume  # doctest: +SKIP
    """

    def __init__(
        self,
        stream: Stream,
        *,
        seed: int,
        batch: int,
        flip: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        window: int = 4096,
    ):
        check_seed(seed)
        if workers < 0 or batch < 1 or window < 1:
            raise TcmError(f"workers={workers} must be at least 0, batch={batch} and window={window} at least 1")
        self._stream = stream
        self._seed = seed
        self._flip = flip
        self._positions = rank_positions(batch, rank, world)
        self._batch = batch
        self._workers = workers
        self._window = window

    def starting_at(self, step: int, resume: Any = None) -> Iterator[LoadedBatch]:
        """Yield the batches of `step`, step + 1, ... without end, from the position `resume` (None: the beginning)."""
        samples = self._shuffled(resume)
        with ThreadPoolExecutor(max(1, self._workers)) as threads:
            for number in count(step):
                whole = list(islice(samples, self._batch))
                mine = [whole[position][0] for position in self._positions]
                images = np.stack(list(threads.map(self._stream.decode, mine)))
                labels = self._labels(mine) if self._stream.classes else None
                mirrored = flips(self._seed, number, self._positions) if self._flip else None
                yield replace(as_batch(images, labels, mirrored, self._positions, number), resume=whole[-1][1])

    def _labels(self, samples: list[Sample]) -> np.ndarray[Any, np.dtype[np.int64]]:
        for sample in samples:
            if sample.label is None:
                raise TcmError(f"{sample.name} has no label, as others have; add it or remove the image")
        return Labels.of([sample.label or 0 for sample in samples], self._stream.where, self._stream.class_names).values

    def _shuffled(self, resume: Any) -> Iterator[tuple[Sample, dict[str, Any]]]:
        place = resume or {"epoch": 0, "window": 0, "start": None, "taken": 0}
        if not isinstance(place, dict) or place.keys() != {"epoch", "window", "start", "taken"}:
            raise TcmError(
                f"resume={resume!r} is not a position of a stream; pass LoadedBatch.resume of an earlier batch"
            )
        number, start, taken = place["window"], place["start"], place["taken"]
        for epoch in count(place["epoch"]):
            arriving = self._stream.samples(self._seed, epoch, start)
            while window := list(islice(arriving, self._window)):
                order = permutation(len(window), self._seed, epoch, number)
                for shown in range(taken, len(window)):
                    saved = {"epoch": epoch, "window": number, "start": start, "taken": shown + 1}
                    yield window[order[shown]][0], saved
                number, start, taken = number + 1, window[-1][1], 0
            number, start, taken = 0, None, 0


def open_stream(
    where: str | Path, *, channels: int | None = None, class_names: tuple[str, ...] = (), split: str = "train"
) -> Stream:
    """Open a stream: a folder of .tar shards, paths or URLs with braces (`https://.../{000..099}.tar`), or `hf://owner/name`.

    The extra `data` is needed for it. Labelled shards without the dataset.json that `tcm data prepare` writes need
    `class_names`.
    """
    name = str(where)
    folder = Path(where)
    if name.startswith(HUB):
        return RowStream(name.removeprefix(HUB), split, channels, class_names)
    if folder.is_dir():
        shards = sorted(str(path) for path in folder.glob("*.tar*"))
        if not shards:
            return RowStream(name, split, channels, class_names)
        return ShardStream(shards, channels, class_names or class_names_beside(folder))
    return ShardStream(_expanded(name), channels, class_names or class_names_beside(folder.parent))


def _shard_samples(shard: str) -> Iterator[Sample]:
    tariterators = _webdataset()
    try:
        for members in tariterators.tarfile_samples([{"url": shard}]):
            name = f"{shard}/{members['__key__']}"
            images = [data for suffix, data in members.items() if f".{suffix}" in EXTENSIONS]
            if len(images) > 1:
                raise TcmError(f"{name} has {len(images)} images; a sample has one")
            if images:
                label = class_number(members["cls"], f"{name}.cls") if "cls" in members else None
                yield Sample(name, images[0], label)
    except TcmError:
        raise
    except TAR_ERRORS as error:
        raise TcmError(f"{shard} cannot be read to its end ({error.args[0]}); copy or download it again") from error


def _expanded(pattern: str) -> list[str]:
    _webdataset()
    from braceexpand import braceexpand

    return list(braceexpand(pattern))


def _webdataset() -> Any:
    try:
        from webdataset import tariterators
    except ImportError as error:
        raise TcmError("WebDataset streams need more packages: pip install 'truncated-consistency[data]'") from error
    return tariterators
