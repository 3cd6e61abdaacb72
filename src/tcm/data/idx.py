"""IDX files: how MNIST and its relatives are published."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tcm.data.dataset import ArrayDataset, ClassLabels, Dataset, Pixels
from tcm.data.limits import check_expansion
from tcm.foundation.errors import TcmError
from tcm.foundation.files import open_regular

_UINT8 = 8
_SPLIT_PREFIXES = {"train": "train-", "test": "t10k-"}
GZIP = b"\x1f\x8b"


def open_idx_folder(folder: Path, split: str) -> Dataset:
    """Open the folder of an MNIST-like data set: train-images-idx3-ubyte (t10k-... for split "test"), perhaps .gz."""
    prefix = _SPLIT_PREFIXES.get(split, f"{split}-")
    found = sorted(folder.glob(f"{prefix}images[-.]idx3-ubyte*"))
    if not found:
        raise TcmError(f"{folder} has no file {prefix}images-idx3-ubyte for split {split!r}; name a split that exists")
    return open_idx(found[0])


def open_idx(images: Path) -> Dataset:
    """Open a file of images, with the file of labels next to it: ...images-idx3... and ...labels-idx1..."""
    pixels = read_idx(images)
    if pixels.ndim == 4 and pixels.shape[3] == 3:
        pixels = pixels.transpose(0, 3, 1, 2)
    elif pixels.ndim == 3:
        pixels = pixels[:, None]
    else:
        raise TcmError(f"{images} has dimensions {pixels.shape}; images are [n, H, W] or [n, H, W, 3]")
    labels = images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
    if labels == images or not labels.exists():
        return ArrayDataset(pixels)
    return ArrayDataset(pixels, ClassLabels.of(read_idx(labels), str(labels)))


def read_idx(path: Path) -> Pixels:
    """Read an IDX file of bytes: 0, 0, 8, the number of dimensions, the dimensions (big-endian uint32), the values."""
    try:
        stored = path.stat().st_size
        with open_regular(path) as stream:
            packed = stream.read(2) == GZIP
            stream.seek(0)
            file = gzip.GzipFile(fileobj=stream) if packed else stream
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or kind != _UINT8 or not 1 <= dimensions <= 4:
                raise TcmError(f"{path} is not an IDX file of bytes with 1 to 4 dimensions; give one that is")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            declared = math.prod(shape)
            check_expansion(str(path), declared, stored)
            data = file.read(declared + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise TcmError(f"{path} is damaged ({error}); copy or download it again") from error
    if len(data) != declared:
        have = "more" if len(data) > declared else f"{len(data):,}"
        raise TcmError(f"{path} declares {declared:,} values but holds {have}; copy or download it again")
    values: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    return values.reshape(shape)
