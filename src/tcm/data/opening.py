"""Open a data set by name or path; what it is follows from its content."""

import json
import re
import zipfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from tcm.data.arrays import open_npy, open_npz
from tcm.data.captions import read_by
from tcm.data.cifar import open_cifar, open_cifar_folder
from tcm.data.dataset import ArrayDataset, Dataset, Pixels
from tcm.data.encoded import is_encoded, open_encoded, steered
from tcm.data.huggingface import HUB, SAVED_MARKS, RowPictures
from tcm.data.idx import GZIP, open_idx, open_idx_folder
from tcm.data.images import open_images
from tcm.data.labels import DATASET_JSON
from tcm.data.limits import LARGEST_FILE
from tcm.data.pictures import ZIP_ERRORS, FolderPictures, Pictures, TarPictures
from tcm.data.zips import ZipPictures
from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import data_folder
from tcm.foundation.files import near_names, open_regular, read_regular
from tcm.foundation.plugins import Trust, entry_point, find_class
from tcm.method.conditions import ConditionKind
from tcm.text.condition import Texts

FETCHABLE = ("cifar10", "emoji", "fashion-mnist", "mnist")
STREAM = "stream:"
ENTRY_POINTS = "tcm.data"


def open_dataset(
    path: str | Path,
    *,
    channels: int | None = None,
    skip_broken: bool = False,
    split: str = "train",
    memory_limit: int = 2**30,
    expected: ConditionKind | None = None,
) -> Dataset:
    """Open a data set: "digits" (bundled), a fetched one by its name ("cifar10"), a file, a folder, `hf://owner/name`.

    A subclass of `Dataset` from outside is named as `module:Class`, or by its entry point in the group `tcm.data`.

    `channels` (1 or 3) converts all images; without it they keep theirs and must agree. `skip_broken` leaves out images
    that cannot be read and warns of them. `split` chooses among the parts of files that have several ("train", "test").
    Image files whose pixels fit into `memory_limit` bytes are decoded once, now; larger sets
    each time they are read. If texts are `expected`, the images' captions are encoded in that way.

    >>> open_dataset("digits").shape
    (1, 8, 8)
    """
    check_channels(channels)
    opened = _open(path, split)
    if isinstance(opened, Pictures):
        return read_by(open_images(opened, channels, skip_broken, memory_limit), expected)
    return read_by(steered(opened if channels is None else with_channels(opened, channels), expected), expected)


def check_channels(channels: int | None) -> None:
    """Refuse a number of channels that images cannot be converted to."""
    if channels not in (None, 1, 3):
        raise TcmError(f"channels={channels} is not supported; use 1 (grey), 3 (RGB) or none (as stored)")


def open_pictures(path: str | Path, split: str = "train") -> Pictures | Dataset:
    """Open image files as they are, of any sizes (as `prepare` needs them); arrays of images come as a data set."""
    return _open(path, split)


def with_channels(dataset: Dataset, channels: int) -> Dataset:
    """Convert a data set to grey (ITU-R 601 luma, as Pillow rounds it) or to RGB (grey repeated), in memory.

    Latents, whose channels are no colours, stay as they are.
    """
    if dataset.shape[0] == channels or dataset.latents is not None:
        return dataset
    if dataset.trajectory(np.arange(1)) is not None:
        raise TcmError(
            f"channels={channels} would not convert the trajectories that are stored with these images of "
            f"{dataset.shape[0]} channels; leave channels out"
        )
    parts = [_luma(part) if channels == 1 else part.repeat(3, axis=1) for part in dataset.chunks()]
    return ArrayDataset(np.concatenate(parts), dataset.annotations, dataset.skipped)


def _luma(images: Pixels) -> Pixels:
    red, green, blue = np.moveaxis(images.astype(np.uint32), 1, 0)
    grey = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return np.asarray(grey, np.uint8)[:, None]


def _open(path: str | Path, split: str) -> Pictures | Dataset:
    name = str(path)
    if name.startswith(STREAM):
        raise TcmError(f"{name} is a stream, but this needs images by index; download them and give their path")
    if name == "digits":
        only_train(name, split)
        with as_file(files("tcm.data") / "digits.npz") as bundled:
            return open_npz(bundled, split)
    if name in FETCHABLE:
        fetched = data_folder() / f"{name}.npz"
        if not fetched.exists():
            raise TcmError(
                f"{name} is not on this machine yet; run `tcm data fetch {name}` (or write ./{name} for a path)"
            )
        return open_npz(fetched, split)
    if name.startswith(HUB):
        return RowPictures(name.removeprefix(HUB), split)
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, split)
    if path.exists():  # `check_class` takes it for a path too
        return _open_file(path, split)
    if is_class(name):
        opened: Dataset = open_class(name, split, Dataset)
        return opened
    raise TcmError(f"there is no file or folder {name}; {_hint(name)}")


def is_class(name: str) -> bool:
    """Whether a name is that of a class from outside: `module:Class`, or an entry point of the group `tcm.data`.

    >>> is_class("my_package.data:Halves"), is_class("https://example.org/a.tar"), is_class("C:\\\\images")
    (True, False, False)
    """
    return re.fullmatch(r"[\w.]+:\w+", name) is not None or entry_point(ENTRY_POINTS, name) is not None


def check_class(key: str, path: str, trust: Trust) -> None:
    """Refuse data that is a class of a module which the user has neither named nor trusts."""
    name = path.removeprefix(STREAM)
    if is_class(name) and not Path(name).exists():
        ours: dict[str, type[object]] = {}
        find_class(key, name, ours, object, ENTRY_POINTS, trust)


def open_class(name: str, split: str, base: type) -> Any:
    """Open the data that a class from outside gives: a subclass of `base`, called without arguments."""
    only_train(name, split)
    ours: dict[str, type[Any]] = {}
    return find_class("data", name, ours, base, ENTRY_POINTS, trust=True)()


def _hint(name: str) -> str:
    if "://" in name or "{" in name:
        return f"for a stream of shards write {STREAM}{name}"
    if made := re.fullmatch(rf"(.*/)?({'|'.join(FETCHABLE)})-(\d+)\.zip", name):
        source, size = made.group(2, 3)
        return f"make it with: tcm data fetch {source} && tcm data prepare {source} {name} --size {size}"
    if near := near_names(name, FETCHABLE):
        return f"did you mean {near[0]}?"
    return f"for the Hugging Face hub write {HUB}{name}" if name.count("/") == 1 else "check the path"


def _open_folder(folder: Path, split: str) -> Pictures | Dataset:
    if is_encoded(folder):
        only_train(str(folder), split)
        return open_encoded(folder)
    if any((folder / mark).is_file() for mark in SAVED_MARKS) or any(folder.glob("**/*.parquet")):
        return RowPictures(str(folder), split)
    if any(folder.glob("data_batch_*")) or any(folder.glob("test_batch*")):
        return open_cifar_folder(folder, split)
    if any(folder.glob("*images[-.]idx3-ubyte*")):
        return open_idx_folder(folder, split)
    only_train(str(folder), split)
    shards = sorted(folder.glob("*.tar"))
    return TarPictures(shards, shard_class_names(folder)) if shards else FolderPictures(folder)


def _open_file(path: Path, split: str) -> Pictures | Dataset:
    with open_regular(path) as file:
        start = file.read(512)
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        return _open_zip(path, split)
    only_train(str(path), split)
    if start.startswith(b"\x93NUMPY"):
        return open_npy(path)
    if start.startswith((GZIP, b"\x00\x00\x08")):
        return open_idx(path)
    if start[257:262] == b"ustar":
        return TarPictures([path], shard_class_names(path.parent))
    if start.startswith(b"\x80") or path.suffix == ".bin":
        return open_cifar([path])
    raise TcmError(
        f"{path} has an unknown format; give a folder or zip of images, .npz, .npy, IDX, CIFAR-10 batches, "
        "WebDataset shards (.tar) or a Hugging Face data set"
    )


def _open_zip(path: Path, split: str) -> Pictures | Dataset:
    try:
        with zipfile.ZipFile(path) as archive:  # once: the directory of a large zip takes its time
            if any(name.endswith(".npy") for name in archive.namelist()):
                return open_npz(path, split)
            only_train(str(path), split)
            return ZipPictures(path, archive)
    except TcmError:
        raise
    except ZIP_ERRORS as error:
        raise TcmError(f"{path} is not a valid zip file ({error}); copy or download it again") from error


def shard_class_names(folder: Path) -> tuple[str, ...]:
    """Read the class names that `tcm data prepare` writes next to shards."""
    return tuple(str(name) for name in _described_shards(folder).get("class_names", []))


def shard_texts(folder: Path) -> Texts | None:
    """Read which encoder's embeddings `tcm data prepare` has written into shards; None if it has not."""
    written = _described_shards(folder).get("text")
    return None if written is None else Texts(**written)


def _described_shards(folder: Path) -> dict[str, Any]:
    source = folder / DATASET_JSON
    if not source.exists():
        return {}
    content = read_regular(source, LARGEST_FILE)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TcmError(f"{source} is not the JSON object that describes shards ({error}); fix or remove it") from error
    if not isinstance(found, dict):
        raise TcmError(f"{source} is not the JSON object that describes shards; fix or remove it")
    return found


def only_train(name: str, split: str) -> None:
    """Refuse any split but "train" for data without splits."""
    if split != "train":
        raise TcmError(f"{name} has no splits, so there is no split {split!r}; give the path of that part of the data")
