"""CIFAR-10's own files, in the python and in the binary version. A pickle's code is never run."""

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tcm.data.dataset import ArrayDataset, ClassLabels, Dataset, Indices, Pixels
from tcm.data.limits import LARGEST_FILE
from tcm.foundation.errors import TcmError
from tcm.foundation.files import read_regular

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PIXELS = 3 * 32 * 32


def open_cifar_folder(folder: Path, split: str) -> Dataset:
    """Open a folder with data_batch_1 to data_batch_5 (split "train") and test_batch ("test"), with or without .bin."""
    pattern = {"train": "data_batch_*", "test": "test_batch*"}.get(split)
    files = sorted(folder.glob(pattern)) if pattern else []
    if not files:
        raise TcmError(
            f"{folder} has no files for split {split!r}; CIFAR-10 has data_batch_* (train) and test_batch (test)"
        )
    return open_cifar(files)


def open_cifar(files: list[Path]) -> Dataset:
    """Open batch files of either version, one after the other."""
    batches = [_read(path) for path in files]
    images = np.concatenate([images for images, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    return ArrayDataset(images, ClassLabels.of(labels, str(files[0]), CLASS_NAMES))


def binary_batch(images: Pixels, labels: Indices) -> bytes:
    """Return images [n, 3, 32, 32] and labels in the binary version's form: n times <1 label><3072 pixels>."""
    return np.concatenate([labels.astype(np.uint8)[:, None], images.reshape(len(images), _PIXELS)], axis=1).tobytes()


def parse_binary(data: bytes, source: str) -> tuple[Pixels, Indices]:
    """Read the binary version: records of one label byte and 3072 pixels."""
    if not data or len(data) % (_PIXELS + 1):
        raise TcmError(
            f"{source} has {len(data):,} bytes, which is not a multiple of {_PIXELS + 1}; copy or download it again"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _PIXELS + 1)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def parse_python(data: bytes, source: str) -> tuple[Pixels, Indices]:
    """Read the python version, a pickled dict with b"data" and b"labels", by an unpickler that builds nothing else."""
    try:
        _check_opcodes(data)
        batch = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
        stored, labels = batch[b"data"], batch[b"labels"]
        if not isinstance(stored, _StoredArray) or not isinstance(labels, list):
            raise TypeError("no array of data or no list of labels")
        pixels = stored.pixels()
        numbers = np.array(labels, dtype=np.int64)
    except TcmError:
        raise
    except (
        pickle.UnpicklingError,
        struct.error,
        EOFError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        MemoryError,
        ImportError,
    ) as error:
        raise TcmError(f"{source} is not a batch of CIFAR-10's python version ({error}); download it again") from error
    return pixels, numbers


def _read(path: Path) -> tuple[Pixels, Indices]:
    data = read_regular(path, LARGEST_FILE)
    return parse_python(data, str(path)) if data[:1] == b"\x80" else parse_binary(data, str(path))


@dataclass
class _StoredArray:
    """Stands for numpy's array while its pickle is read: keeps the stored shape and bytes, runs nothing."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def pixels(self) -> Pixels:
        _, shape, dtype, fortran, values = self.state
        if (
            not isinstance(dtype, _StoredDtype)
            or dtype.code not in (b"u1", "u1")
            or not isinstance(values, bytes)
            or fortran
        ):
            raise TypeError("the data is not bytes in C order")
        return np.frombuffer(values, np.uint8).reshape(shape).reshape(-1, 3, 32, 32)


@dataclass
class _StoredDtype:
    code: object

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment do not matter for bytes."""


def _check_opcodes(data: bytes) -> None:
    """Read the pickle without running it: the unpickler allocates what an opcode claims, whatever the file holds."""
    for opcode, argument, _ in pickletools.genops(data):
        if (
            opcode.proto > 2
            or (opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data))
            or opcode.name == "PUT"
        ):
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name} {argument!r:.20}, which no batch has")


def _stored_array(*_: object) -> _StoredArray:
    return _StoredArray()


def _stored_dtype(code: object, *_: object) -> _StoredDtype:
    return _StoredDtype(code)


def _encoded(text: str, encoding: str) -> bytes:
    # Python 3 pickles bytes for old protocols as a call of _codecs.encode(text, "latin1").
    if encoding != "latin1":
        raise TypeError(f"unexpected encoding {encoding!r}")
    return text.encode("latin1")


class _BatchUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., object]:
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return _stored_array
            case "numpy", "ndarray":
                return _StoredArray
            case "numpy", "dtype":
                return _stored_dtype
            case "_codecs", "encode":
                return _encoded
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch does; nothing of it was run")
