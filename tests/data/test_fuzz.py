"""Damaged and invented files: they open, or end in our error; nothing else, and no memory beyond bounds."""

import gzip
import io
import json
import tempfile
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import writers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tcm.data import open_dataset
from tcm.data.decode import BrokenImage, decode_picture
from tcm.foundation.errors import TcmError

IMAGES = writers.sample_pixels(3, height=8, width=8)
LABELS = np.array([0, 1, 2])


def zip_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def npz_of(compress: bool) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(file, images=IMAGES, labels=LABELS)
    return file.getvalue()


def npy_of(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tar_of() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writers.write_shards(Path(folder) / "d", IMAGES, LABELS)
        return (Path(folder) / "d" / "part-0000.tar").read_bytes()


def cifar_of() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        images = writers.sample_pixels(2)
        return (writers.write_cifar_python(Path(folder) / "d", images, LABELS[:2], 1) / "data_batch_1").read_bytes()


SEEDS = {
    "zip": zip_of(writers.with_edm_json(IMAGES, LABELS)),
    "npz": npz_of(compress=False),
    "compressed npz": npz_of(compress=True),
    "npy": npy_of(IMAGES),
    "idx": writers.idx_bytes(IMAGES[:, 0]),
    "idx.gz": gzip.compress(writers.idx_bytes(IMAGES[:, 0])),
    "tar": tar_of(),
    "cifar": cifar_of(),
}


@st.composite
def damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    """Change, insert and cut bytes; often near the start and the end, where headers and directories are."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.one_of(st.integers(0, 200), st.integers(-300, -1), st.integers(0, len(seed)))) % (len(data) + 1)
        kind = draw(st.sampled_from(["change", "insert", "cut", "number"]))
        if kind == "change":
            data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=8))
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 64))]
        else:
            data[place : place + 4] = draw(
                st.sampled_from([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\xff\xff\xff\x7f"])
            )
    return bytes(data)


def open_and_read(data: bytes, name: str) -> None:
    """The largest allocation of a file this small is the free part of the expansion limit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        message = ""
        tracemalloc.start()
        try:
            dataset = open_dataset(path)
            dataset.read(np.arange(dataset.count))
        except TcmError as error:
            message = str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert "\n" not in message
    assert peak < 150_000_000


@pytest.mark.parametrize("kind", SEEDS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files(kind: str, data: st.DataObject) -> None:
    open_and_read(data.draw(damaged(SEEDS[kind])), "data_batch_1" if kind == "cifar" else "train-images-idx3-ubyte")


@settings(max_examples=150, deadline=None)
@given(
    header=st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(lambda text: text.encode("latin1", "replace")),
        st.builds(
            lambda descr, order, shape: repr({"descr": descr, "fortran_order": order, "shape": shape}).encode(
                "latin1", "replace"
            ),
            st.one_of(
                st.sampled_from(["|u1", "<u1", "|O", "<f8", "<U99", "V9", "|S0", "<U0"]),
                st.text(max_size=4),
                st.integers(),
            ),
            st.one_of(st.booleans(), st.none()),
            st.one_of(st.lists(st.integers(-(2**70), 2**70), max_size=5).map(tuple), st.integers(), st.none()),
        ),
    ),
    tail=st.binary(max_size=40),
    version=st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x00\x00"]),
)
@example(header=b"(" * 9000, tail=b"", version=b"\x01\x00")
@example(
    header=b"{'descr': '|u1', 'fortran_order': False, 'shape': (0, 9999999999, 3, 8)}", tail=b"", version=b"\x01\x00"
)
def test_invented_npy_headers(header: bytes, tail: bytes, version: bytes) -> None:
    length = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    data = b"\x93NUMPY" + version + length + header + tail
    open_and_read(data, "d.npy")
    open_and_read(zip_of({"images.npy": data}), "d.npz")


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from([8, 9, 13]),
    dimensions=st.integers(0, 6),
    sizes=st.lists(st.integers(0, 2**32 - 1), max_size=6),
    tail=st.binary(),
)
def test_invented_idx_headers(kind: int, dimensions: int, sizes: list[int], tail: bytes) -> None:
    data = bytes([0, 0, kind, dimensions]) + b"".join(size.to_bytes(4, "big") for size in sizes) + tail
    open_and_read(data, "train-images-idx3-ubyte")
    open_and_read(gzip.compress(data), "train-images-idx3-ubyte")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just("00000.png"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["labels", "class_names", "00000.png"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(content=st.one_of(json_values, st.fixed_dictionaries({"labels": json_values, "class_names": json_values})))
def test_invented_dataset_json(content: object) -> None:
    open_and_read(zip_of({"00000.png": writers.png(IMAGES[0]), "dataset.json": json.dumps(content).encode()}), "d.zip")


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12).map(lambda stem: stem + ".png"),
        unique=True,
        max_size=4,
    )
)
def test_invented_zip_names(names: list[str]) -> None:
    open_and_read(zip_of({name: writers.png(IMAGES[0]) for name in names}), "d.zip")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_damaged_pictures(kind: str, data: st.DataObject) -> None:
    file = io.BytesIO()
    Image.fromarray(IMAGES[0].transpose(1, 2, 0)).save(file, kind)
    content = data.draw(damaged(file.getvalue()))
    with suppress(BrokenImage):
        assert decode_picture(content, "a.png").mode in ("L", "RGB")
