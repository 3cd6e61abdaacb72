"""Data that come one after another: WebDataset shards (also from URLs) and Hugging Face streaming."""

import hashlib
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import islice
from pathlib import Path
from time import sleep
from typing import IO, Any, Self, cast
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
from PIL import Image

from tcm.data.caption_files import EMBEDDING, caption_of
from tcm.data.dataset import ClassLabels, Pixels, named_classes
from tcm.data.decode import BrokenImage, channels_of, decode_picture, pixels_of
from tcm.data.encoded import is_encoded
from tcm.data.huggingface import (
    HUB,
    encoded_bytes,
    image_column,
    label_column,
    stream_rows,
    text_column,
    without_decoding,
)
from tcm.data.limits import LARGEST_FILE, is_hidden
from tcm.data.opening import (
    check_channels,
    is_class,
    only_train,
    open_class,
    shard_class_names,
)
from tcm.data.pictures import TAR_ERRORS, class_number
from tcm.data.shards import ShardSample, is_plain, most_bytes, shard_samples
from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.foundation.files import open_regular
from tcm.method.conditions import Condition, ConditionKind
from tcm.text.autoencoders import Latents

RETRIES = (0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each new attempt at a shard from a URL."""
MOST_BROKEN = 100
"""Images at the beginning of a stream that may be broken before its shape is known."""
MOST_SHARDS = 300_000
"""That braces in the name of a stream may stand for."""
PATIENCE = 60.0
"""Seconds without a byte after which a connection counts as broken."""


@dataclass(frozen=True)
class Sample:
    """One image, not yet decoded; what its annotation means is up to its stream."""

    name: str
    data: bytes
    annotation: object = None
    caption: str | None = None
    embedding: bytes | None = None
    """The caption as a text encoder read it, in numpy's format, if that is stored with the image."""
    problem: str = ""
    """Why there is no image, if there is none."""

    def picture(self) -> Image.Image:
        """The image, decoded."""
        if self.problem:
            raise BrokenImage(self.problem, "remove it")
        return decode_picture(self.data, self.name)


class Stream(ABC):
    """Images in numbered shards, each read from its beginning. All images have the shape of the first.

    `identity` says which data these are: a saved position is valid for one identity, and a model's provenance names it.
    A stream whose images are annotated overrides `condition_kind` and `condition`.
    """

    latents: Latents | None = None
    """What the images are encoded to, if they are latents (float16) instead of pixels."""

    def __init__(self, where: str, identity: str, shards: int, channels: int | None = None):
        check_channels(channels)
        self.where, self.identity, self.shards = where, identity, shards
        first, picture = self._first()
        self.shape = (channels or channels_of(picture), picture.height, picture.width)
        self._annotated = first.annotation is not None
        self._convert = channels is not None

    @property
    def condition_kind(self) -> ConditionKind | None:
        """Return what a model of this data can be conditioned on; by default nothing."""
        return None

    def condition(self, samples: Sequence[Sample]) -> Condition | None:
        """Return the condition of these samples; by default none."""
        return None

    def with_channels(self, channels: int) -> Self:
        """Return this stream with its images converted to grey (1) or RGB (3)."""
        check_channels(channels)
        converted = copy(self)
        converted.shape, converted._convert = (channels, *self.shape[1:]), True
        return converted

    @abstractmethod
    def shard(self, number: int) -> Iterator[Sample]:
        """Yield the samples of a shard, always in the same order."""

    def leave_out(self, error: BrokenImage) -> None:
        """Agree to leave out a sample whose image cannot be read; by default that is an error."""
        raise error

    def _first(self) -> tuple[Sample, Image.Image]:
        """The first sample whose image can be read; those before it are met again, and judged then."""
        broken: BrokenImage | None = None
        for sample in islice((sample for shard in range(self.shards) for sample in self.shard(shard)), MOST_BROKEN):
            try:
                return sample, sample.picture()
            except BrokenImage as error:
                broken = broken or error
        if broken is None:
            raise TcmError(f"{self.where} holds no images; give a stream that does")
        raise broken

    def decode(self, sample: Sample) -> Pixels:
        """Return a sample's pixels, checked against the stream's shape."""
        picture = sample.picture()
        channels, height, width = self.shape
        if picture.size != (width, height) or (not self._convert and channels_of(picture) != channels):
            raise TcmError(
                f"{sample.name} is {picture.width}×{picture.height} with {channels_of(picture)} channels, but the "
                f"stream began with {width}×{height} and {channels}; bring all to one form with `tcm data prepare`"
            )
        return pixels_of(picture, channels)


class ClassStream(Stream):
    """Images that are annotated with the numbers of their classes, or not at all."""

    def __init__(
        self, where: str, identity: str, shards: int, channels: int | None = None, class_names: tuple[str, ...] = ()
    ):
        super().__init__(where, identity, shards, channels)
        self._class_names = class_names

    @property
    def condition_kind(self) -> ConditionKind | None:
        """Return the classes."""
        if not self._annotated:
            return None
        if not self._class_names:
            raise TcmError(f"{self.where} has labels, but does not say how many classes there are; set classes")
        return named_classes(self._class_names)

    def condition(self, samples: Sequence[Sample]) -> Condition | None:
        """Return the classes of these samples."""
        if not self._annotated:
            return None
        labels = []
        for sample in samples:
            if not isinstance(sample.annotation, int):
                raise TcmError(f"{sample.name} has no label, though other images have one; add it or remove the image")
            labels.append(sample.annotation)
        return ClassLabels.of(labels, self.where, self._class_names).condition(np.arange(len(labels)))


class ShardStream(ClassStream):
    """WebDataset shards: paths or URLs, as webdataset opens them."""

    def __init__(self, shards: list[str], channels: int | None, class_names: tuple[str, ...]):
        if any(shard.strip().lower().startswith("pipe:") for shard in shards):
            raise TcmError("shards that start with pipe: would run a command; give paths or URLs")
        self._shards = shards
        super().__init__(shards[0], _names_and_sizes(shards), len(shards), channels, class_names)

    def shard(self, number: int) -> Iterator[Sample]:
        """Yield the samples of a tar file; if the connection to a URL breaks, reconnect and continue."""
        shard, given = self._shards[number], 0
        waits = iter(RETRIES if "://" in shard else ())
        while True:
            try:
                for sample in islice(_shard_samples(shard), given, None):
                    yield sample
                    given += 1
                return
            except TcmError:
                raise
            except (*TAR_ERRORS, HTTPException) as error:
                refused = isinstance(error, HTTPError) and error.code < 500
                wait = None if refused else next(waits, None)
                if wait is None:
                    reason = " ".join(str(error).split())[:200]
                    raise TcmError(f"{shard} cannot be read to its end ({reason}); check or replace it") from error
                sleep(wait)


class RowStream(ClassStream):
    """A Hugging Face data set, streamed: a folder, or `hf://owner/name` or `hf://owner/name@revision`."""

    def __init__(self, where: str, split: str, channels: int | None, class_names: tuple[str, ...]):
        rows, commit = stream_rows(where, split)
        if rows.features is None:
            raise TcmError(f"{where} does not say what its columns are; download it and open it without streaming")
        column = label_column(rows)
        self._image = image_column(rows, where)
        self._label, self._text = column[0] if column else None, text_column(rows)
        used = [name for name in (self._image, self._label, self._text) if name is not None]
        self._rows = without_decoding(rows, self._image).select_columns(used)
        if commit is None:
            inside = [path for path in Path(where).rglob("*") if path.is_file()]
            shown = [str(path) for path in inside if not is_hidden(path.relative_to(where).as_posix())]
            identity = _names_and_sizes(sorted(shown))
        else:
            identity = f"{where.partition('@')[0]}@{commit}"
        names = column[1] if column else ()
        super().__init__(where, f"{split} of {identity}", rows.num_shards, channels, names or class_names)

    def shard(self, number: int) -> Iterator[Sample]:
        """Yield the samples of one of the library's shards."""
        for index, row in enumerate(self._rows.shard(self.shards, number)):
            name = f"{self.where} row {index} of shard {number}"
            label = None if self._label is None else row[self._label]
            caption = None if self._text is None else row[self._text]
            data, problem = b"", ""
            try:
                data = encoded_bytes(row[self._image], name)
            except BrokenImage as error:
                problem = error.problem
            yield Sample(name, data, None if label is None else int(label), caption or None, problem=problem)


def open_stream(
    where: str | Path, *, channels: int | None = None, class_names: tuple[str, ...] = (), split: str = "train"
) -> Stream:
    """Open a stream: a folder of .tar shards, paths or URLs with braces (`https://.../{000..099}.tar`), or `hf://owner/name`;
    or your own class, `module:Class`.

    All but a folder of shards needs the extra `data`. `class_names` are for a stream that has labels and no names for
    them; shards have names if `tcm data prepare` wrote a dataset.json next to them.
    """
    name = str(where)
    folder = Path(where)
    if not folder.exists() and is_class(name):
        opened: Stream = open_class(name, split, Stream)
        return opened if channels is None else opened.with_channels(channels)
    shards = sorted(str(path) for path in folder.glob("*.tar*"))
    if is_encoded(folder):
        raise TcmError(f"{name} holds latents that were made ahead, which are read by index; leave out stream:")
    if name.startswith(HUB) or (folder.is_dir() and not shards):
        return RowStream(name, split, channels, class_names)
    only_train(name, split)
    if not shards and not folder.exists() and not any(mark in name for mark in ("://", "{", "pipe:")):
        raise TcmError(
            f"there is no file or folder {name}; give the path or the URLs of the shards (--data, data.path)"
        )
    shard_folder = folder if shards else folder.parent
    return ShardStream(shards or _expanded(name), channels, shard_class_names(shard_folder) or class_names)


def _names_and_sizes(files: list[str]) -> str:
    """Identify files by their names and sizes; URLs by themselves."""
    found = [f"{Path(file).name} {Path(file).stat().st_size}" if Path(file).is_file() else file for file in files]
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()
    return f"{len(files)} files, names and sizes {digest}"


def _shard_samples(shard: str) -> Iterator[Sample]:
    """A shard that is cut between two files must not pass for a whole one: the last sample waits until it is."""
    with _opened(shard) as file:
        last: ShardSample[bytes] | None = None
        for sample in shard_samples(_files_in(file), shard):
            if last is not None:
                yield _sample_of(last, shard)
            last = sample
        if isinstance(file, HTTPResponse):
            file.read()
            if file.length:
                raise EOFError(f"{file.length} bytes are missing")
        if last is not None:
            yield _sample_of(last, shard)


def _sample_of(found: ShardSample[bytes], shard: str) -> Sample:
    name, data = f"{shard}/{found.key}", found.files[found.image]
    label = class_number(found.files["cls"], f"{name}.cls") if "cls" in found.files else None
    problem = f"{name} has more than {LARGEST_FILE:,} bytes" if len(data) > LARGEST_FILE else ""
    return Sample(name, data, label, caption_of(found.files), found.files.get(EMBEDDING), problem)


def _files_in(file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for member in archive:
            if is_plain(member) and (content := archive.extractfile(member)) is not None:
                yield member.name, content.read(min(member.size, most_bytes(member.name)))
            archive.members = []  # type: ignore[attr-defined]  # it would keep one for each file


def _opened(shard: str) -> AbstractContextManager[IO[bytes]]:
    """webdataset opens addresses, but would open a special file, and runs a command for some names of local files.
    A signal to this run would end its curl within a shard."""
    if shard.startswith(("http://", "https://")):
        opened: IO[bytes] = urlopen(shard, timeout=PATIENCE)
        return opened
    if "://" not in shard:
        return open_regular(shard)
    return cast(AbstractContextManager[IO[bytes]], _webdataset().gopen(shard))


def _expanded(pattern: str) -> list[str]:
    _webdataset()
    from braceexpand import braceexpand

    spans = [abs(int(last) - int(first)) for first, last in re.findall(r"(\d{1,4000})\.\.(\d{1,4000})", pattern)]
    try:
        shards = [] if max(spans, default=0) > MOST_SHARDS else list(islice(braceexpand(pattern), MOST_SHARDS + 1))
    except ValueError as error:
        raise TcmError(f"{pattern} is no name of shards ({error}); correct its braces") from error
    if not 0 < len(shards) <= MOST_SHARDS:
        raise TcmError(f"{pattern} stands for more than {MOST_SHARDS:,} shards; correct its braces")
    return shards


def _webdataset() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise TcmError(f"WebDataset streams need more packages; {how_to_install('data')}") from error
    return webdataset
