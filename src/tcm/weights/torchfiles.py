"""Tensors in foreign files: what `torch.save` wrote, checked by our own machine before torch opens it.

`torch.load(weights_only=True)` runs nothing, but it allocates what a file declares before it looks whether that much
is there, and older versions of it had holes. So each file is first run through `tcm.weights.pickles` with a
whitelist of storages and tensors, every declared size is compared with the bytes that are really there, and only
then does torch read it.
"""

import io
import math
import mmap
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.foundation.files import open_regular
from tcm.weights.pickles import Constructor, Global, Machine, Record, Refused, refusal, shown

MAGIC = 0x1950A86A20F9469CFC6C
MAX_ZIP_ENTRIES = 100_000
MAX_DIMENSIONS = 8
MAX_TENSORS = 100_000
MAX_NESTED_OPERATIONS = 1_000  # a nested storage takes 50

STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


# What `zipfile` raises for damaged archives.
ZIP_ERRORS = (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, LookupError, OSError, struct.error, OverflowError)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A row of numbers: its type, how many, and the numbers themselves unless they are only declared so far."""

    dtype: torch.dtype
    count: int
    data: torch.UntypedStorage | None = None


class TensorBuilder:
    """Builds tensors from checked storages, not more of them than the file can hold.

    A tensor of size s and stride d at offset o needs elements o ... o + sum((s-1) d) of its storage, and may not
    repeat any of them: prod(s) <= count.
    """

    def __init__(self, file_size: int) -> None:
        self.tensors = 0
        self.tensor_bytes_left = 2 * file_size  # twice: parameters may be tied
        self.nested_bytes_left = file_size  # once: a nested file that is opened again and again would fill the memory

    def tensor(self, arguments: tuple[object, ...]) -> object:
        """`torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
        if len(arguments) not in (6, 7):
            raise Refused(f"a tensor with {len(arguments)} arguments")
        storage, offset, size, stride = arguments[:4]
        if not isinstance(storage, Storage):
            raise Refused("a tensor without a storage")
        (start,), sizes, strides = whole_numbers((offset,)), whole_numbers(size), whole_numbers(stride)
        if len(sizes) != len(strides):
            raise Refused(f"a tensor of {len(sizes)} dimensions with {len(strides)} strides")
        count = math.prod(sizes)
        last = start + sum((s - 1) * d for s, d in zip(sizes, strides, strict=True)) if count else start - 1
        if count > storage.count or last >= storage.count:
            raise Refused(f"a tensor of size {sizes} in a storage of {storage.count:,} elements")
        self.tensors += 1
        self.tensor_bytes_left -= count * storage.dtype.itemsize
        if self.tensor_bytes_left < 0 or self.tensors > MAX_TENSORS:
            raise Refused("more tensors than the file can hold")
        if storage.data is None:
            return Record("tensor", ())
        return torch.empty(0, dtype=storage.dtype).set_(storage.data, start, sizes, strides)

    def parameter(self, arguments: tuple[object, ...]) -> object:
        """`torch._utils._rebuild_parameter(tensor, requires_grad, hooks)`: the tensor."""
        if len(arguments) != 3 or not isinstance(arguments[0], Tensor | Record):
            raise Refused("a parameter without a tensor")
        return arguments[0]

    def storage(self, arguments: tuple[object, ...]) -> Storage:
        """`torch.storage._load_from_bytes(bytes)`: the one storage in the bytes of a nested `torch.save`."""
        if len(arguments) != 1 or not isinstance(arguments[0], memoryview):
            raise Refused("a nested storage without its bytes")
        data = arguments[0]
        self.nested_bytes_left -= len(data)
        if self.nested_bytes_left < 0:
            raise Refused("the same nested storage many times")
        declared = check_legacy(Machine(data, dict.fromkeys(STORAGES, no_call), max_operations=MAX_NESTED_OPERATIONS))
        if not isinstance(declared, Storage):
            raise Refused("a nested torch.save that holds no storage")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates its own typed storages
            loaded = open_with_torch(lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
            if not isinstance(loaded, torch.storage.TypedStorage):
                raise Refused("a nested torch.save that holds no storage")
            untyped: torch.UntypedStorage = loaded.untyped()  # type: ignore[no-untyped-call]
        if loaded.dtype != declared.dtype or untyped.nbytes() != declared.count * declared.dtype.itemsize:
            raise Refused("a nested torch.save whose size is not what it declares")
        return Storage(declared.dtype, declared.count, untyped)

    def constructors(self) -> dict[str, Constructor]:
        """What every file with tensors may name."""
        return {
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_parameter": self.parameter,
            "collections.OrderedDict": empty_dict,
        }


def whole_numbers(values: object) -> tuple[int, ...]:
    """Sizes, strides and offsets: a tuple of integers that are not negative."""
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMENSIONS:
        raise Refused(f"a tensor whose size is not a tuple of at most {MAX_DIMENSIONS} numbers")
    checked = tuple(v for v in values if type(v) is int and 0 <= v < 2**48)
    if len(checked) != len(values):
        raise Refused("a tensor whose size is not made of integers")
    return checked


def empty_dict(arguments: tuple[object, ...]) -> dict[str, object]:
    """OrderedDict and EasyDict become plain dicts; their items follow by themselves."""
    if arguments:
        raise Refused("a dict that is made with arguments")
    return {}


def no_call(arguments: tuple[object, ...]) -> object:
    """For names that are only ever mentioned (torch's storage classes)."""
    raise Refused("a call of a storage class")


def open_with_torch(load: Callable[[], object]) -> object:
    """Turn whatever torch dislikes about a checked file into a refusal."""
    try:
        return load()
    except (RuntimeError, UnpicklingError, ValueError, TypeError, LookupError, EOFError, AttributeError) as error:
        raise Refused(f"torch cannot read it: {shown(str(error))}") from error


def check_legacy(machine: Machine) -> object:
    """Run the five pickles of a file from before torch 1.6 and compare the storages behind them with their sizes."""
    declared: dict[str, Storage] = {}

    def resolve(identifier: object) -> Storage:
        if not isinstance(identifier, tuple) or len(identifier) != 6 or identifier[5] is not None:
            raise Refused("a persistent id that is not a storage")
        return declare(identifier[:5], declared)

    machine.resolve = None
    magic, version, system = machine.run(), machine.run(), machine.run()
    if magic != MAGIC or version != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Refused("not a little-endian torch file")
    machine.resolve = resolve
    value = machine.run()
    machine.resolve = None
    keys = machine.run()
    if not isinstance(keys, list) or any(type(key) is not str for key in keys) or sorted(keys) != sorted(declared):
        raise Refused("storages that are not those which were declared")
    for key in keys:
        storage = declared[key]
        if machine.number(8) != storage.count:
            raise Refused("a storage whose size is not what was declared")
        machine.take(storage.count * storage.dtype.itemsize)
    if machine.position != len(machine.data):
        raise Refused(f"{len(machine.data) - machine.position:,} bytes follow its end")
    return value


def declare(identifier: tuple[object, ...], declared: dict[str, Storage]) -> Storage:
    """Note a storage from its persistent id ("storage", class, key, location, count)."""
    kind, storage_class, key, location, count = identifier
    if kind != "storage" or not isinstance(storage_class, Global) or storage_class.name not in STORAGES:
        raise Refused("a persistent id that is not a storage")
    if not isinstance(key, str) or not isinstance(location, str):
        raise Refused("a storage whose key is not text")
    (checked_count,) = whole_numbers((count,))
    storage = Storage(STORAGES[storage_class.name], checked_count)
    known = declared.setdefault(key, storage)
    if (known.dtype, known.count) != (storage.dtype, storage.count):
        raise Refused("a storage that is declared twice, differently")
    return known


def check_zip(archive: zipfile.ZipFile, file_size: int) -> None:
    """Check every entry of a zip that torch wrote, and its pickle against the sizes of the storages."""
    infos = archive.infolist()
    names = {info.filename for info in infos}
    folder = infos[0].filename.split("/")[0] if infos else ""
    if len(names) != len(infos):
        raise Refused("two entries of the same name")
    for info in infos:
        parts = info.filename.split("/")
        if parts[0] != folder or len(parts) < 2 or {"", ".", ".."} & set(parts) or "\\" in info.filename:
            raise Refused(f"the entry {shown(info.filename)}, which leaves its folder")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise Refused(f"the packed entry {shown(info.filename)}; torch stores its entries as they are")
    if f"{folder}/constants.pkl" in names:
        raise Refused("a TorchScript program instead of weights")
    sizes = {info.filename: info.file_size for info in infos}
    if f"{folder}/data.pkl" not in sizes or sum(sizes.values()) > file_size:
        raise Refused("a zip that torch did not write")
    if f"{folder}/byteorder" in sizes and archive.read(f"{folder}/byteorder") != b"little":
        raise Refused("a big-endian torch file")
    declared: dict[str, Storage] = {}

    def resolve(identifier: object) -> Storage:
        if not isinstance(identifier, tuple) or len(identifier) != 5:
            raise Refused("a persistent id that is not a storage")
        storage = declare(identifier, declared)
        if sizes.get(f"{folder}/data/{identifier[2]}") != storage.count * storage.dtype.itemsize:
            raise Refused(f"the storage {shown(str(identifier[2]))}, whose size is not what was declared")
        return storage

    Machine(memoryview(archive.read(f"{folder}/data.pkl")), torch_constructors(file_size), resolve).run()


def torch_constructors(file_size: int) -> Mapping[str, Constructor]:
    """What a plain torch file may name: dicts, tensors, storages."""
    return {**TensorBuilder(file_size).constructors(), **dict.fromkeys(STORAGES, no_call)}


def read_torch(path: Path) -> object:
    """What `torch.save` wrote to `path` (both of its formats), checked first, then read with `weights_only=True`.

    >>> read_torch(Path("model.pth"))["net"]["model.map_layer0.bias"].shape  # doctest: +SKIP
    torch.Size([512])
    """
    mapped = map_file(path)
    try:
        if mapped[:4] != b"PK\x03\x04":
            check_legacy(Machine(memoryview(mapped), torch_constructors(len(mapped))))
            # From memory: given a file, torch would also try its oldest format, a tar.
            return open_with_torch(lambda: torch.load(io.BytesIO(mapped), map_location="cpu", weights_only=True))
        if count_zip_entries(mapped) > MAX_ZIP_ENTRIES:
            raise Refused(f"more than {MAX_ZIP_ENTRIES:,} entries")
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, len(mapped))
        return open_with_torch(lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Refused as reason:
        raise refusal(str(path), reason) from None
    except ZIP_ERRORS as error:
        raise TcmError(f"{path}: not a readable torch file ({shown(str(error))}); download it again") from error


def count_zip_entries(mapped: mmap.mmap) -> int:
    """An upper bound, found without reading the directory: each of its entries begins with the same four bytes."""
    count, start = 0, mapped.find(b"PK\x01\x02")
    while start >= 0 and count <= MAX_ZIP_ENTRIES:
        count, start = count + 1, mapped.find(b"PK\x01\x02", start + 4)
    return count


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file, mapped: nothing is read before it is needed."""
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except TcmError:
        raise
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise TcmError(f"{path}: cannot be read ({error}); give the path of a checkpoint file") from error
