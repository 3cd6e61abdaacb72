"""Batches of a stream: it cannot jump to a step, so it has a position, from which reading resumes exactly."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from typing import TypeVar

import numpy as np

from tcm.data.dataset import Pixels
from tcm.data.decode import BrokenImage
from tcm.data.loader import LoadedBatch, Resume, as_batch
from tcm.data.order import check_seed, flips, permutation, rank_indices
from tcm.data.streams import Sample, Stream
from tcm.foundation.errors import TcmError

T = TypeVar("T")


@dataclass(frozen=True)
class LanePosition:
    """Where a lane stands: in which epoch and window, at which shard and sample that window begins, and how many of its
    samples have been shown."""

    epoch: int = 0
    window: int = 0
    shard: int = 0
    sample: int = 0
    taken: int = 0


class StreamBatches:
    """A stream's batches: image p of step n is the next one of lane (n·batch + p) mod `lanes`.

    A lane reads its share of each epoch's shards and shuffles within windows; about `window` images of all lanes mix.
    Both orders depend on (seed, epoch, lane, window) alone. Process `rank` of `world` takes the indices rank,
    rank + world, ... of each batch. As `world` divides `lanes`, these are whole lanes: a process reads its share of the
    shards only, and the whole batch does not depend on the number of processes. `workers` threads read and as many
    decode, a window and a batch ahead of what is asked for.

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
        lanes: int = 8,
        window: int = 4096,
    ):
        check_seed(seed)
        if workers < 0 or min(batch, lanes, window) < 1:
            raise TcmError(
                f"workers={workers} must be at least 0, batch={batch}, lanes={lanes} and window={window} at least 1"
            )
        self._stream = stream
        self._seed = seed
        self._batch = batch
        self._flip = flip
        self._index = rank_indices(batch, rank, world)
        self._lanes = _shared_lanes(stream, lanes, world)
        self._own_lanes = range(rank, self._lanes, world)
        self._window = max(1, window // self._lanes)
        self._threads = max(1, workers)

    def starting_at(self, step: int, resume: Resume | None = None) -> Iterator[LoadedBatch]:
        """Yield the batches of `step`, step + 1, ... without end, from the position `resume` (None: the beginning)."""
        if resume is None and step:
            raise TcmError(f"step={step}: a stream cannot jump there; resume from the position of the batch before it")
        if resume is None:
            return self._read(step, {lane: LanePosition() for lane in self._own_lanes})
        if resume.get("stream") != self._stream.identity:
            raise TcmError(
                f"{self._stream.where} has changed since it was read: it was {resume.get('stream')} and is now "
                f"{self._stream.identity}; restore it or start again"
            )
        if len(resume) != 1 + self._lanes:
            raise TcmError(f"lanes={self._lanes}, but the stream was read in {len(resume) - 1} lanes; use that number")
        return self._read(step, {lane: LanePosition(**resume[f"lane {lane}"]) for lane in self._own_lanes})

    def _read(self, step: int, positions: dict[int, LanePosition]) -> Iterator[LoadedBatch]:
        with _pool(1) as assembler, _pool(self._threads) as readers, _pool(self._threads) as decoders:
            lanes = {lane: self._samples(lane, position, readers) for lane, position in positions.items()}
            yield from _ahead(self._batches(step, lanes, positions, decoders), assembler)

    def _batches(
        self,
        step: int,
        lanes: dict[int, Iterator[tuple[Sample, LanePosition]]],
        positions: dict[int, LanePosition],
        decoders: ThreadPoolExecutor,
    ) -> Iterator[LoadedBatch]:
        for number in count(step):
            used = [int(number * self._batch + index) % self._lanes for index in self._index]
            coming = []
            for lane in used:
                sample, positions[lane] = next(lanes[lane])
                coming.append((sample, decoders.submit(self._stream.decode, sample)))
            samples, images = [], []
            for lane, (sample, decoding) in zip(used, coming, strict=True):
                while (pixels := self._pixels(decoding)) is None:
                    sample, positions[lane] = next(lanes[lane])
                    decoding = decoders.submit(self._stream.decode, sample)
                samples.append(sample)
                images.append(pixels)
            condition = self._stream.condition(samples)
            mirrored = flips(self._seed, number, self._index) if self._flip else None
            resume: Resume = {"stream": self._stream.identity}
            resume |= {f"lane {lane}": asdict(position) for lane, position in positions.items()}
            yield replace(as_batch(np.stack(images), condition, mirrored, self._index, number), resume=resume)

    def _pixels(self, decoding: Future[Pixels]) -> Pixels | None:
        """The decoded image; None if it is broken and the stream leaves it out."""
        try:
            return decoding.result()
        except BrokenImage as error:
            self._stream.leave_out(error)
            return None

    def _samples(
        self, lane: int, position: LanePosition, readers: ThreadPoolExecutor
    ) -> Iterator[tuple[Sample, LanePosition]]:
        """Yield a lane's samples, each with the position after it."""
        for begin, window in _ahead(self._windows(lane, position), readers):
            order = permutation(len(window), self._seed, begin.epoch, 1 + begin.window * self._lanes + lane)
            for shown in range(begin.taken, len(window)):
                yield window[order[shown]], replace(begin, taken=shown + 1)

    def _windows(self, lane: int, position: LanePosition) -> Iterator[tuple[LanePosition, list[Sample]]]:
        """Yield a lane's windows, in the order in which they are read, each with the position at its beginning."""
        while True:
            order = permutation(self._stream.shards, self._seed, position.epoch)[lane :: self._lanes]
            arriving = _in_order(self._stream, order.tolist(), position.shard, position.sample)
            while window := list(islice(arriving, self._window)):
                yield position, [sample for sample, _, _ in window]
                _, shard, sample = window[-1]
                position = LanePosition(position.epoch, position.window + 1, shard, sample)
            position = LanePosition(position.epoch + 1)


def _shared_lanes(stream: Stream, lanes: int, world: int) -> int:
    """The number of lanes: at most one per shard, and a multiple of the processes."""
    if stream.shards < world:
        raise TcmError(
            f"{stream.where} has {stream.shards} shards for {world} processes; use at most {stream.shards}, or pack "
            "the images into more shards"
        )
    possible = min(lanes, stream.shards)
    if possible % world:
        raise TcmError(
            f"data.lanes={lanes}: a stream of {stream.shards} shards is then read in {possible} lanes, which {world} "
            f"processes cannot share evenly; use data.lanes={max(1, possible // world) * world}"
        )
    return possible


def _in_order(stream: Stream, order: Sequence[int], shard: int, sample: int) -> Iterator[tuple[Sample, int, int]]:
    """Yield the samples of the shards in `order`, from a position in it on, each with the position after it."""
    for number in range(shard, len(order)):
        skipped = sample if number == shard else 0
        for index, found in islice(enumerate(stream.shard(order[number])), skipped, None):
            yield found, number, index + 1


def _ahead(items: Iterator[T], threads: ThreadPoolExecutor) -> Iterator[T]:
    """Yield endless `items`; the next one is made in a thread meanwhile, and its error waits until it is asked for."""
    coming = threads.submit(next, items)
    while True:
        item = coming.result()
        coming = threads.submit(next, items)
        yield item


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
