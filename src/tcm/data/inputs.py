"""Open what a command is given: a data set, or a stream."""

from pathlib import Path

from tcm.data.caption_streams import captioned
from tcm.data.dataset import Dataset, numbered
from tcm.data.opening import STREAM, open_dataset, shard_texts
from tcm.data.streams import ClassStream, Stream, open_stream
from tcm.method.conditions import Classes, ConditionKind
from tcm.text.condition import Texts


def open_data(
    path: str | Path, *, channels: int | None = None, expected: ConditionKind | None = None, split: str = "train"
) -> Dataset | Stream:
    """Open what a command is given: a stream if it starts with `stream:`, else a data set.

    If classes are `expected`, they are those of a stream that has labels and does not say how many classes there are.
    If texts are, the images' captions are encoded in that way.

    >>> str(open_data("digits").condition_kind)
    '10 classes'
    """
    name = str(path)
    if not name.startswith(STREAM):
        return open_dataset(path, channels=channels, split=split, expected=expected)
    class_names = numbered(expected.count) if isinstance(expected, Classes) else ()
    where = name.removeprefix(STREAM)
    stream = open_stream(where, channels=channels, class_names=class_names, split=split)
    if isinstance(expected, Texts) and isinstance(stream, ClassStream):
        return captioned(stream, expected, shard_texts(Path(where) if Path(where).is_dir() else Path(where).parent))
    return stream
