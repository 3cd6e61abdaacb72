"""WebDataset shards: which files of a tar make up a sample, the same by index and as a stream.

A sample's files stand next to each other and share their key, the name up to its first dot; what follows is the suffix.
"""

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from tcm.data.decode import EXTENSIONS
from tcm.data.limits import LARGEST_FILE, is_hidden, is_one_line
from tcm.foundation.errors import TcmError

LARGEST_TEXT = 65_536
"""Bytes of a caption in a shard; what is longer is no caption."""

Content = TypeVar("Content")


@dataclass(frozen=True)
class ShardSample(Generic[Content]):
    """The files of one image, by suffix; `image` is the suffix of the image itself."""

    key: str
    image: str
    files: dict[str, Content]


def shard_samples(members: Iterable[tuple[str, Content]], shard: str) -> Iterator[ShardSample[Content]]:
    """Group a shard's files, given with their names in the tar's order; what belongs to no image is left out."""
    seen: set[str] = set()
    shown = (member for member in members if not is_hidden(member[0]))
    for key, group in groupby(shown, lambda member: _key_and_suffix(member[0], shard)[0]):
        files: dict[str, Content] = {}
        for name, content in group:
            suffix = _key_and_suffix(name, shard)[1]
            if suffix in files:
                raise TcmError(f"{shard} holds two files {name}; a sample has each of its files once: rename one")
            files[suffix] = content
        images = [suffix for suffix in files if f".{suffix}" in EXTENSIONS]
        if len(images) > 1:
            raise TcmError(
                f"{shard}: {key} has {len(images)} images, {key}.{images[0]} and {key}.{images[1]}; a sample must "
                "have exactly one: rename the others"
            )
        unclear = next((suffix for suffix in files if f".{suffix.rpartition('.')[2]}" in EXTENSIONS), None)
        if unclear is not None and not images:
            raise TcmError(
                f"{shard}: {key}.{unclear} is not the image of {key}, since its suffix begins at the first dot; rename "
                "it, with one dot"
            )
        if key in seen:
            raise TcmError(f"{shard}: the files of {key} are not next to each other; pack them in sorted order")
        seen.add(key)
        if images:
            yield ShardSample(key, images[0], files)


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member of a tar is a file with content of its own."""
    return member.isreg() and not member.issparse()


def most_bytes(name: str, images: int = LARGEST_FILE + 1) -> int:
    """How much of a shard's file is read: of a class its number, of texts a caption's worth, and so much of others."""
    if name.lower().endswith(".cls"):
        return 32
    return LARGEST_TEXT if name.lower().endswith((".txt", ".json")) else images


def _key_and_suffix(name: str, shard: str) -> tuple[str, str]:
    if not is_one_line(name):
        raise TcmError(f"{shard} holds a file with the name {name!r}; pack it again with plain names")
    folder, slash, base = name.rpartition("/")
    key, _, suffix = base.partition(".")
    return f"{folder}{slash}{key}", suffix.lower()
