"""Zips: the same bytes as zipfile reads from all that zips may be, little memory, and nothing from hostile ones."""

import io
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import writers
from hypothesis import given, settings
from hypothesis import strategies as st

from tcm.data import open_dataset
from tcm.data.decode import BrokenImage
from tcm.data.opening import open_pictures
from tcm.data.pictures import PackedNames
from tcm.foundation.errors import TcmError

IMAGES = writers.sample_pixels(6, height=8, width=8)
FILES = writers.numbered(IMAGES)


def contents(path: Path) -> dict[str, bytes]:
    pictures = open_pictures(path)
    return {name: pictures.data(place) for place, name in enumerate(pictures.names)}


class Pipe(io.RawIOBase):
    """What cannot be rewound: zipfile then writes sizes and sums behind the data."""

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.written += bytes(data)
        return len(data)


file_names = st.text(
    st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/\\:."), min_size=1, max_size=9
).map(lambda stem: stem + ".png")


@settings(max_examples=60)
@given(
    files=st.dictionaries(file_names, st.binary(max_size=300), min_size=1, max_size=6),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    piped=st.booleans(),
    zip64=st.booleans(),
    comment=st.binary(max_size=30),
)
def test_any_zip_reads_as_zipfile_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    files: dict[str, bytes],
    method: int,
    piped: bool,
    zip64: bool,
    comment: bytes,
) -> None:
    target = Pipe() if piped else io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        archive.comment = comment
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = method
            entry.comment = comment
            entry.extra = struct.pack("<HH4s", 0xCAFE, 4, b"more")
            with archive.open(entry, "w", force_zip64=zip64) as file:
                file.write(data)
    path = tmp_path_factory.getbasetemp() / "any.zip"
    path.write_bytes(target.written if isinstance(target, Pipe) else target.getvalue())
    assert contents(path) == files


def test_names_in_the_old_alphabet(tmp_path: Path) -> None:
    """Without the flag for UTF-8, names are in code page 437."""
    path = writers.write_zip(tmp_path / "d.zip", {"ae.png": FILES["00000.png"]})
    data = path.read_bytes().replace(b"ae.png", "äé.png".encode("cp437"))
    path.write_bytes(data)
    assert contents(path) == {"äé.png": FILES["00000.png"]}


def test_what_a_process_needs_of_a_zip_is_small(tmp_path: Path) -> None:
    """Each reading process opened the zip again: half a kilobyte for each file, 90 GB on a node with ImageNet."""
    count = 3000
    files = {f"{number // 1000:05d}/img{number:08d}.png": FILES["00000.png"] for number in range(count)}
    dataset = open_dataset(writers.write_zip(tmp_path / "d.zip", files, zipfile.ZIP_STORED), memory_limit=0)
    dataset.read(np.arange(3))
    sent = pickle.dumps(dataset)
    assert len(sent) < count * 80
    copy = pickle.loads(sent)
    tracemalloc.start()
    copy.read(np.array([count - 1]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def directory_entry(data: bytes, name: str) -> int:
    """Where the directory's entry for a file begins."""
    return data.rindex(name.encode()) - 46


def test_files_that_overlap_are_refused(tmp_path: Path) -> None:
    """Two entries of the directory that point at the same bytes."""
    path = writers.write_zip(tmp_path / "d.zip", FILES, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    first, second = (directory_entry(data, name) for name in ("00000.png", "00001.png"))
    for field in (slice(16, 28), slice(42, 46)):  # checksum and sizes; where the file begins
        data[second + field.start : second + field.stop] = data[first + field.start : first + field.stop]
    path.write_bytes(data)
    with pytest.raises(TcmError, match=r"d\.zip has overlapping entries"):
        open_dataset(path)


@pytest.mark.parametrize("change", ["name", "signature", "start", "size", "checksum", "cut"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_file_that_contradicts_the_directory_is_damaged(tmp_path: Path, change: str, method: int) -> None:
    path = writers.write_zip(tmp_path / "d.zip", FILES, method)
    dataset = open_dataset(path, memory_limit=0)
    data = bytearray(path.read_bytes())
    header, entry = data.index(b"00003.png") - 30, directory_entry(data, "00003.png")
    match change:
        case "name":
            data[header + 30 : header + 39] = b"00009.png"
        case "signature":
            data[header] ^= 1
        case "start":
            data[entry + 42] ^= 1
        case "size":
            data[entry + 24] ^= 1
        case "checksum":
            data[entry + 16] ^= 1
        case "cut":
            data = data[: header + 40]
    path.write_bytes(data)
    # A file that is cut off does not open; a process may get it as it was before.
    dataset = pickle.loads(pickle.dumps(dataset)) if change == "cut" else open_dataset(path, memory_limit=0)
    np.testing.assert_array_equal(dataset.read(np.arange(3))[0], IMAGES[:3])
    with pytest.raises(BrokenImage, match=r"d\.zip/00003\.png is damaged .*--skip-broken"):
        dataset.read(np.array([3]))


def test_data_that_inflate_beyond_their_claim_are_never_held(tmp_path: Path) -> None:
    path = writers.write_zip(tmp_path / "d.zip", {**FILES, "a.png": bytes(50_000_000)})
    data = bytearray(path.read_bytes())
    entry = directory_entry(data, "a.png")
    data[entry + 24 : entry + 28] = struct.pack("<I", 1000)
    path.write_bytes(data)
    pictures = open_pictures(path)
    tracemalloc.start()
    with pytest.raises(BrokenImage, match="size"):
        pictures.data(list(pictures.names).index("a.png"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@given(st.lists(st.text(st.characters(), max_size=8), max_size=6))
def test_packed_names_are_the_names(names: list[str]) -> None:
    packed = PackedNames(names)
    assert list(packed) == names
    assert packed[1:] == names[1:]
    assert [packed[place - len(names)] for place in range(len(names))] == names
    with pytest.raises(IndexError):
        packed[len(names)]
