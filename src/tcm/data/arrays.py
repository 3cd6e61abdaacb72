"""Data sets in numpy's files: .npz and .npy, with their headers checked before anything is allocated."""

import tokenize
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tcm.data.captions import Captions
from tcm.data.dataset import ArrayDataset, ClassLabels, Dataset, Pixels
from tcm.data.limits import check_zip_entry
from tcm.data.pictures import ZIP_ERRORS
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write, open_regular

# What numpy's reader of headers raises for damaged ones, found by fuzzing.
_HEADER_ERRORS = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    SyntaxError,
    tokenize.TokenError,
    RecursionError,
    MemoryError,
    OverflowError,
)


def open_npz(path: Path, split: str) -> Dataset:
    """Open an .npz file: `images` and `labels`, `x_train` and `y_train`, or `arr_0` and `arr_1`; perhaps `class_names`.

    Other splits are called by their names: `test_images`/`test_labels` or `x_test`/`y_test`. `captions` and
    `test_captions` hold a text for each image.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pairs = [(f"{split}_images", f"{split}_labels"), (f"x_{split}", f"y_{split}")]
            if split == "train":
                pairs = [("images", "labels"), *pairs, ("arr_0", "arr_1")]
            present = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
            chosen = next((pair for pair in pairs if pair[0] in present), None)
            if chosen is None:
                raise TcmError(
                    f"{path} holds the arrays {sorted(present)[:8]}; split {split!r} needs one "
                    f"called {' or '.join(pair[0] for pair in pairs)}"
                )
            images = as_images(_member(archive, chosen[0], path), f"{path}/{chosen[0]}")
            labels = None
            if chosen[1] in present:
                names = _texts(_member(archive, "class_names", path)) if "class_names" in present else []
                labels = ClassLabels.of(_member(archive, chosen[1], path), f"{path}/{chosen[1]}", names)
            texts = f"{'' if split == 'train' else f'{split}_'}captions"
            captions = _texts(_member(archive, texts, path)) if texts in present else None
    except TcmError:
        raise
    except ZIP_ERRORS as error:
        raise TcmError(f"{path} is not a valid .npz file ({error}); copy or create it again") from error
    return ArrayDataset(images, labels if captions is None else Captions(captions, labels))


def open_npy(path: Path) -> Dataset:
    """Open an .npy file of images, memory-mapped: uint8 [n, H, W], [n, C, H, W] or [n, H, W, C]."""
    with open_regular(path) as file:
        shape, fortran, dtype = _header(file, str(path))
        offset = file.tell()
    _check_length(str(path), shape, dtype, path.stat().st_size - offset)
    array = np.memmap(path, dtype, "r", offset, shape, order="F" if fortran else "C")
    return ArrayDataset(as_images(array, str(path)), mapped=path)


def save_npz(path: Path, splits: dict[str, Dataset]) -> None:
    """Write data sets with the same classes into one .npz that `open_npz` reads; it appears whole or not at all."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for split, dataset in splits.items():
        prefix = "" if split == "train" else f"{split}_"
        arrays[f"{prefix}images"] = np.concatenate(list(dataset.chunks()))
        if dataset.class_labels is not None:
            arrays[f"{prefix}labels"] = dataset.class_labels.values
            arrays["class_names"] = np.array(dataset.class_labels.names)
        if dataset.captions is not None:
            arrays[f"{prefix}captions"] = np.array(list(dataset.captions))
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def as_images(array: NDArray[np.generic], source: str) -> Pixels:
    """Bring an array of images to uint8 [n, C, H, W]; the shape must show which axis holds the channels."""
    if array.dtype != np.uint8:
        raise TcmError(f"{source} has dtype {array.dtype}; store pixels as uint8, 0 to 255")
    pixels = array.view(np.uint8)
    if array.ndim == 3:
        return pixels[:, None]
    if array.ndim != 4:
        raise TcmError(f"{source} has shape {array.shape}; images are [n, H, W], [n, C, H, W] or [n, H, W, C]")
    first, last = array.shape[1] in (1, 3), array.shape[3] in (1, 3)
    if first == last:
        problem = "could be read both ways" if first else "has no axis of 1 or 3 channels"
        raise TcmError(f"{source} has shape {array.shape}, which {problem}; store it as [n, C, H, W] with C = 1 or 3")
    return pixels if first else pixels.transpose(0, 3, 1, 2)


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> NDArray[np.generic]:
    entry = archive.getinfo(f"{name}.npy")
    source = f"{path}/{name}"
    check_zip_entry(path, entry, path.stat().st_size)
    with archive.open(entry) as file:
        shape, fortran, dtype = _header(file, source)
        _check_length(source, shape, dtype, entry.file_size - file.tell())
        data = file.read()
    _check_length(source, shape, dtype, len(data))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _header(file: IO[bytes], source: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        version = npy.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = npy.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(file)
        else:
            raise TcmError(f"{source} has version {version} of numpy's format; write it with numpy.save")
    except TcmError:
        raise
    except _HEADER_ERRORS as error:
        reason = " ".join(str(error).split())[:120]
        raise TcmError(f"{source} has a damaged numpy header ({reason}); copy or create it again") from error
    if dtype.kind not in "uiU" or any(length < 0 for length in shape):
        raise TcmError(f"{source} has dtype {dtype} and shape {shape}; store uint8 images and integer labels")
    return shape, fortran, dtype


def _check_length(source: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], available: int) -> None:
    declared = dtype.itemsize
    for length in shape:
        declared *= length  # Python's integers: a product of numpy's could wrap round
    if declared != available:
        raise TcmError(f"{source} declares {declared:,} bytes but holds {available:,}; copy or create it again")


def _texts(array: NDArray[np.generic]) -> list[str]:
    return [str(text) for text in array.ravel()]
