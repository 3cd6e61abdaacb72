"""A corpus of hostile checkpoints: files that run code, fill the memory or never end in a loader that trusts them."""

import functools
import importlib
import io
import os
import pickle
import runpy
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Hostile:
    """One file; `fires` says that Python's own unpickler runs its payload (which creates the marker)."""

    data: bytes
    suffix: str = ".pkl"
    fires: bool = False


class Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def call(name: str, *arguments: str) -> bytes:
    """Opcodes that call a global with texts."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(map(text, arguments)) + b"tR"


def whole(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def code_runners(marker: Path) -> dict[str, Hostile]:
    """Files that name a function which runs code, one for each well-known way."""
    shell = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w').close()"
    argv = [sys.executable, "-c", python]
    fires = {
        "posix_system": whole(call("posix.system", shell)),
        "os_system": whole(call("os.system", shell)),
        "eval": whole(call("builtins.eval", python)),
        "exec": whole(call("builtins.exec", python)),
        "python_2_eval": b"\x80\x02" + call("__builtin__.eval", python) + b".",
        "protocol_0": f"cos\nsystem\n(S'{shell}'\ntR.".encode(),
        "inst_opcode": f"(S'{shell}'\nios\nsystem\n.".encode(),
        "obj_opcode": whole(b"(" + b"cos\nsystem\n" + text(shell) + b"o"),
        "getattr_chain": pickle.dumps(Calls(eval, f"getattr(__import__('os'), 'system')({shell!r})"), 4),
        "subprocess_run": pickle.dumps(Calls(subprocess.check_call, argv), 4),
        "subprocess_popen": pickle.dumps(Calls(subprocess.call, argv), 5),
        "run_module_code": pickle.dumps(Calls(runpy._run_code, python, {}), 4),
        "nested_pickle": pickle.dumps(Calls(pickle.loads, whole(call("os.system", shell))), 4),
        "state_of_dict": whole(b"}" + text("a") + call("os.system", shell) + b"s"),
        "numpy_object_array": pickle.dumps(np.array([Calls(os.system, shell)], dtype=object), 4),
        "in_a_set": whole(b"\x8f(" + call("os.system", shell) + b"\x90"),
        "discarded": whole(call("os.system", shell) + b"0}"),
        "dotted_name": b"\x80\x04" + text("os") + text("path.os.system") + b"\x93(" + text(shell) + b"tR.",
    }
    silent = {
        "builtins_getattr": whole(call("builtins.getattr", "a", "upper")),
        "import": whole(call("builtins.__import__", "os")),
        "import_module": pickle.dumps(Calls(importlib.import_module, "os"), 4),
        "partial": pickle.dumps(functools.partial(os.system, shell), 4),
        "windows_system": whole(call("nt.system", shell)),
        "compile": whole(call("builtins.compile", python, "x", "exec")),
        "open_for_writing": whole(call("io.open", str(marker), "w")),
        "remove_tree": whole(call("shutil.rmtree", str(marker))),
        "web_browser": whole(call("webbrowser.open", "http://localhost:9")),
        "terminal": whole(call("pty.spawn", shell)),
        "marshal": whole(b"cmarshal\nloads\n(C\x01\x00tR"),
        "ctypes": whole(call("ctypes.CDLL", "libc.so.6")),
        "operator": whole(call("operator.attrgetter", "system")),
        "torch_load": whole(call("torch.serialization.load", str(marker))),
        "torch_hub": whole(call("torch.hub.load", "owner/repo", "model")),
        "torch_script": whole(call("torch.jit._script.unpackage_script_module", "x")),
        "numpy_runstring": whole(call("numpy.testing._private.utils.runstring", python, "x")),
        "copyreg_reconstructor": whole(call("copyreg._reconstructor", "a", "b", "c")),
        "whitelisted_prefix": whole(call("torch._utils._rebuild_tensor_v2.__globals__.get", "os")),
        "whitelisted_dotted": whole(text("collections") + text("OrderedDict.fromkeys") + b"\x93(" + text("a") + b"tR"),
        "whitelisted_module_method": whole(call("torch.nn.modules.container.ModuleDict.__init__", "a")),
        "terminal_escape_in_name": whole(call("\x1b[2J[/bold][red]os\x07.sys\rtem", shell)),
        "global_of_numbers": whole(b"K\x01K\x02\x93"),
        "state_of_function": whole(b"ccollections\nOrderedDict\n}" + text("__call__") + text("x") + b"sb"),
        "setstate_of_list": whole(b"]}" + text("__setstate__") + text("x") + b"sb"),
        "call_of_text": whole(text("os.system") + b"(" + text(shell) + b"tR"),
        "newobj_ex": whole(b"ccollections\nOrderedDict\n)}\x92"),
        "extension_1": whole(b"\x82\xf0(" + text(shell) + b"tR"),
        "extension_2": whole(b"\x83\xf0\x00(" + text(shell) + b"tR"),
        "extension_4": whole(b"\x84\xf0\x00\x00\x00(" + text(shell) + b"tR"),
        "persistent_id": b"Pmodule\n.",
        "binary_persistent_id": whole(text("storage") + b"Q"),
        "out_of_band_buffer": b"\x80\x05\x97.",
        "read_only_buffer": b"\x80\x05C\x01a\x98.",
    }
    cases = {name: Hostile(data, fires=True) for name, data in fires.items()}
    return cases | {name: Hostile(data) for name, data in silent.items()}


def bombs() -> dict[str, Hostile]:
    """Files that want more memory, time or stack than they have a right to."""
    levels = range(40)
    twice = [b"h" + bytes([level]) + b"h" + bytes([level]) for level in levels]
    laughs = b"(]\x94" + b"".join(b"](" + pair + b"e\x94" for pair in twice) + b"t"
    shared_tuples = b"()\x94" + b"".join(pair + b"\x86\x94" for pair in twice) + b"t"
    cases = {
        "memo_index": whole(b"]r\xff\xff\xff\x7f"),
        "memo_index_text": whole(b"]p2147483647\n"),
        "memo_index_unwritten": whole(b"j\xff\xff\xff\x7f"),
        "memo_of_nothing": whole(b"\x94"),
        "billion_laughs": whole(laughs),
        "billion_laughs_in_tuples": whole(shared_tuples),
        "hash_of_shared_tuples": whole(b"}" + shared_tuples + b"Ns"),
        "set_of_shared_tuples": whole(b"\x8f(" + shared_tuples + b"\x90"),
        "contains_itself": whole(b"]\x94h\x00a"),
        "deep_lists": whole(b"]" * 100_000 + b"a" * 99_999),
        "deep_tuples": whole(b")" + b"\x85" * 100_000),
        "deep_marks": whole(b"(" * 100_000 + b"t" * 100_000),
        "deep_records": whole(b"(" + b"ctorch.nn.modules.container\nModuleList\n)\x81" * 500 + b"b" * 499 + b"t"),
        "many_sets": whole(b"(" + b"\x8f" * 600_000 + b"t"),
        "many_lists": whole(b"(" + b"]" * 600_000 + b"t"),
        "many_quoted_memos": whole(b"]" + b"\x94" * 600_000),
        "huge_bytes": whole(b"B\xff\xff\xff\xffabc"),
        "huge_bytes_8": whole(b"\x8e" + struct.pack("<Q", 2**62) + b"abc"),
        "huge_text": whole(b"X\xff\xff\xff\xffabc"),
        "huge_text_8": whole(b"\x8d" + struct.pack("<Q", 2**63 - 1) + b"abc"),
        "huge_bytearray": whole(b"\x96" + struct.pack("<Q", 2**40) + b"abc"),
        "huge_integer": whole(b"\x8b\xff\xff\xff\x7fabc"),
        "huge_integer_text": whole(b"L" + b"9" * 1_000_000 + b"L\n"),
        "huge_frame": whole(b"\x95" + struct.pack("<Q", 2**63) + b"}"),
        "much_text": whole(b"(" + (b"X" + struct.pack("<I", 2**20) + b"a" * 2**20) * 65 + b"t"),
        "endless_name": whole(b"c" + b"a" * 1_000_000),
        "colliding_keys": whole(b"}(" + b"".join(long(i * (2**61 - 1)) + b"N" for i in range(1, 2000)) + b"u"),
    }
    return {name: Hostile(data) for name, data in cases.items()}


def long(value: int) -> bytes:
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def legacy(
    storage: bytes = b"",
    *,
    count: int = 2,
    magic: bytes = b"",
    keys: bytes = b"",
    written: int | None = None,
    location: str = "cpu",
) -> bytes:
    """A `torch.save` of one float32 storage in the old format, with parts of it replaced."""
    identifier = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("k") + text(location) + long(count) + b"NtQ"
    system = b"}" + text("little_endian") + b"\x88s"
    pickles = [magic or long(0x1950A86A20F9469CFC6C), b"M\xe9\x03", system, storage or identifier]
    body = b"".join(b"\x80\x02" + part + b"." for part in [*pickles, keys or b"]" + text("k") + b"a"])
    return body + struct.pack("<q", count if written is None else written) + b"\0" * 8


def nested(data: bytes) -> bytes:
    """Opcodes that leave the storage in the bytes of a nested `torch.save`."""
    return b"ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(data)) + data + b"\x85R"


def tensor(storage: bytes, offset: int, size: list[int], stride: list[int]) -> bytes:
    numbers = [b"(" + b"".join(map(long, values)) + b"t" for values in (size, stride)]
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + long(offset) + b"".join(numbers) + hooks + b"tR"


def nested_files(marker: Path) -> dict[str, Hostile]:
    """Hostile tensors and storages inside of an innocent pickle."""
    shell = call("os.system", f"touch {marker}")
    dtype = b"cnumpy\ndtype\n(" + text("O8") + b"\x89\x88tR"
    module = b"(" + text("module") + b"ccollections\nOrderedDict\n" + text("f.py") + text("import os") + b"tQ"
    zipped = io.BytesIO()
    torch.save(torch.zeros(2), zipped)
    good = nested(legacy())
    again = b"h\x00h\x01\x85R"
    cases = {
        "nested_in_magic": nested(legacy(magic=shell)),
        "nested_in_storage": nested(legacy(storage=shell)),
        "nested_in_keys": nested(legacy(keys=b"](" + shell + b"e")),
        "nested_module_id": nested(legacy(storage=module)),
        "nested_zip": nested(zipped.getvalue()),
        "nested_zip_with_code": nested(torch_zip(shell)),
        "nested_nonsense": nested(b"nonsense"),
        "nested_text": b"ctorch.storage\n_load_from_bytes\n" + text("abc") + b"\x85R",
        "nested_more_than_written": nested(legacy(count=2**40)),
        "nested_size_differs": nested(legacy(written=2**40)),
        "nested_other_keys": nested(legacy(keys=b"]" + text("other") + b"a")),
        "nested_view": nested(
            legacy(storage=b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("k") * 2 + b"K\x02(K\x01ttQ")
        ),
        "nested_other_class": nested(
            legacy(storage=b"(" + text("storage") + b"cos\nsystem\n" + text("k") + text("cpu") + b"K\x02NtQ")
        ),
        "nested_again_and_again": b"(ctorch.storage\n_load_from_bytes\n\x94B"
        + struct.pack("<I", len(legacy()))
        + legacy()
        + b"\x94"
        + again * 10_000
        + b"t",
        "storage_class_called": b"ctorch\nFloatStorage\nK\x09\x85R",
        "tensor_repeats": tensor(good, 0, [2**20, 2**20], [0, 0]),
        "tensor_too_large": tensor(good, 0, [3], [1]),
        "tensor_beyond": tensor(good, 1, [2], [1]),
        "tensor_strides_beyond": tensor(good, 0, [2], [2**40]),
        "tensor_negative_offset": tensor(good, -1, [1], [1]),
        "tensor_negative_size": tensor(good, 0, [-1], [1]),
        "tensor_overflow": tensor(good, 0, [2**62, 2**62], [2**62, 2**62]),
        "tensor_many_dimensions": tensor(good, 0, [1] * 100_000, [1] * 100_000),
        "tensor_without_storage": tensor(b"N", 0, [1], [1]),
        "tensors_without_end": b"(ctorch._utils\n_rebuild_tensor_v2\n\x94("
        + good
        + long(0)
        + b"K\x02\x85K\x01\x85\x89}t\x94"
        + b"h\x00h\x01R" * 200_000
        + b"t",
        "parameter_without_tensor": b"ctorch._utils\n_rebuild_parameter\n]\x88}\x87R",
        "numpy_object_scalar": b"cnumpy.core.multiarray\nscalar\n" + dtype + shell + b"\x86R",
        "numpy_object_bytes": b"cnumpy._core.multiarray\nscalar\n" + dtype + b"C\x08abcdefgh\x86R",
        "numpy_short_scalar": b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n" + text("f8") + b"\x85RC\x01a\x86R",
        "numpy_type_of_list": b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n]\x85RC\x01a\x86R",
        "dict_with_arguments": b"ccollections\nOrderedDict\n]\x85R",
    }
    return {name: Hostile(whole(body)) for name, body in cases.items()}


def torch_zip(body: bytes, entries: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip as `torch.save` writes it, with any pickle and any entries."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for name, data in (entries or {}).items():
            archive.writestr(name, data)
    return buffer.getvalue()


def torch_files(marker: Path) -> dict[str, Hostile]:
    """Hostile `.pth` files, in each format that torch has had."""
    shell = call("os.system", f"touch {marker}")

    def stored(count: int, key: str = "0", storage_class: str = "FloatStorage") -> bytes:
        identifier = f"ctorch\n{storage_class}\n".encode() + text(key) + text("cpu") + long(count)
        return tensor(b"(" + text("storage") + identifier + b"tQ", 0, [2], [1])

    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(name)
            info.size = len(whole(shell))
            archive.addfile(info, io.BytesIO(whole(shell)))
    eight = {"archive/data/0": b"\0" * 8}
    good = torch_zip(stored(2), eight)
    cases = {
        "zip_with_code": torch_zip(shell),
        "zip_parent_folder": torch_zip(stored(2), eight | {"archive/../../escape": b"x"}),
        "zip_storage_in_parent": torch_zip(stored(2, "../../0"), {"archive/data/../../0": b"\0" * 8}),
        "zip_absolute_name": torch_zip(stored(2), eight | {"/etc/escape": b"x"}),
        "zip_backslash": torch_zip(stored(2), eight | {"archive/..\\..\\escape": b"x"}),
        "zip_two_folders": torch_zip(stored(2), eight | {"other/data.pkl": b"x"}),
        "zip_bomb": torch_zip(stored(2**26), {"archive/data/0": b"\0" * 2**25}, zipfile.ZIP_DEFLATED),
        "zip_less_than_declared": torch_zip(stored(2**40), eight),
        "zip_missing_storage": torch_zip(stored(2, "9"), eight),
        "zip_two_types": torch_zip(b"(" + stored(2) + stored(1, "0", "DoubleStorage") + b"t", eight),
        "zip_program": torch_zip(stored(2), eight | {"archive/constants.pkl": b"x"}),
        "zip_big_endian": torch_zip(stored(2), eight).replace(b"little", b"bigbig"),
        "zip_bad_checksum": good.replace(b"FloatStorage", b"HalfStorage\n"),
        "zip_truncated": good[: len(good) // 2],
        "zip_only_the_end": b"PK\x03\x04" + good[-22:],
        "zip_empty": b"PK\x05\x06" + b"\0" * 18,
        "zip_other": b"PK\x03\x04" + torch_zip(b"}")[4:].replace(b"data.pkl", b"other.pk"),
        "zip_many_entries": b"PK\x03\x04" + b"PK\x01\x02" * 200_000,
        "legacy_with_code": legacy(storage=shell),
        "legacy_code_in_magic": legacy(magic=shell),
        "legacy_more_than_written": legacy(count=2**40),
        "tar": tar.getvalue(),
        "bare_pickle": whole(shell),
    }
    return {name: Hostile(data, ".pth") for name, data in cases.items()}


def broken_files() -> dict[str, Hostile]:
    """No attack, but nothing that could be read either."""
    cases = {
        "empty": b"",
        "stop_only": b".",
        "zeros": b"\0" * 1000,
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 223\n",
        "web_page": b"<!DOCTYPE html><html>Sign in</html>",
        "protocol_255": b"\x80\xff}.",
        "protocol_0_dict": b"(dp0\n.",
        "no_stop": b"\x80\x04}",
        "left_over": whole(b"}}"),
        "open_mark": whole(b"(}"),
        "trailing_bytes": whole(b"}") + b"more",
        "text_not_utf8": whole(b"X\x02\x00\x00\x00\xff\xfe"),
        "odd_items": whole(b"}(K\x01u"),
        "append_to_dict": whole(b"}K\x01a"),
        "assign_to_list": whole(b"]K\x01K\x02s"),
        "no_mark": whole(b"t"),
        "just_a_number": whole(b"K\x01"),
        "just_a_list": whole(b"]"),
        "no_network": whole(b"}"),
        "network_is_text": whole(b"}" + text("ema") + text("x") + b"s"),
    }
    return {name: Hostile(data) for name, data in cases.items()}


def hostile_files(marker: Path) -> dict[str, Hostile]:
    """The whole corpus, by name."""
    groups = [code_runners(marker), bombs(), nested_files(marker), torch_files(marker), broken_files()]
    return {name: case for group in groups for name, case in group.items()}
