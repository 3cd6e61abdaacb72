"""A data set or a stream that is a class from outside."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tcm.data import ArrayDataset, Sample, Stream, open_data, open_dataset
from tcm.foundation.errors import TcmError


class Greys(ArrayDataset):
    """Three grey images."""

    def __init__(self) -> None:
        super().__init__(np.full((3, 1, 4, 4), 7, np.uint8))


class GreyStream(Stream):
    """Two shards of one image."""

    def __init__(self) -> None:
        super().__init__("greys", "greys of no colour", 2)

    def shard(self, number: int) -> Iterator[Sample]:
        file = io.BytesIO()
        Image.new("L", (4, 4), 100 * number).save(file, "png")
        yield Sample(f"grey {number}", file.getvalue())


def test_by_its_import_path() -> None:
    assert (open_dataset("test_own_class:Greys").pixels(np.arange(3)) == 7).all()
    assert open_dataset("test_own_class:Greys", channels=3).shape == (3, 4, 4)
    stream = open_data("stream:test_own_class:GreyStream")
    assert isinstance(stream, Stream)
    assert (stream.identity, stream.shape) == ("greys of no colour", (1, 4, 4))


def test_a_stream_is_converted() -> None:
    name = "stream:test_own_class:GreyStream"
    colour = open_data(name, channels=3)
    assert isinstance(colour, Stream)
    assert colour.shape == (3, 4, 4)
    assert (colour.decode(next(colour.shard(1))) == np.full((3, 4, 4), 100)).all()
    grey = open_data(name, channels=1)
    assert isinstance(grey, Stream)
    assert (grey.decode(next(grey.shard(1))) == np.full((1, 4, 4), 100)).all()
    with pytest.raises(TcmError, match="channels=2 is not supported"):
        open_data(name, channels=2)


def test_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "greys-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greys\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tcm.data]\ngreys = test_own_class:Greys\ndigits = test_own_class:Greys\n")
    with pytest.raises(TcmError, match="there is no file or folder greys"):
        open_dataset("greys")
    monkeypatch.syspath_prepend(tmp_path)
    assert open_dataset("greys").shape == (1, 4, 4)
    assert open_dataset("digits").shape == (1, 8, 8), "our own names stay ours"


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((2, 8, 8, 1), np.uint8))
    (tmp_path / "images.npy").rename(tmp_path / "test_own_class:Greys")
    assert open_dataset("test_own_class:Greys").shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Data", "data='nowhere:Data' cannot be imported .* put its module on the Python path"),
        ("test_own_class:Whites", "data='test_own_class:Whites' cannot be imported .* correct its module, or the name"),
        (
            "test_own_class:GreyStream",
            "data='test_own_class:GreyStream' is not a subclass of Dataset; name one that is",
        ),
        ("os:abort", "data='os:abort' is not a subclass of Dataset"),
        ("stream:test_own_class:Greys", "data='test_own_class:Greys' is not a subclass of Stream"),
    ],
)
def test_what_is_wrong_is_named(name: str, message: str) -> None:
    with pytest.raises(TcmError, match=message):
        open_data(name)


def test_a_class_has_no_splits() -> None:
    with pytest.raises(TcmError, match="test_own_class:Greys has no splits"):
        open_dataset("test_own_class:Greys", split="test")
