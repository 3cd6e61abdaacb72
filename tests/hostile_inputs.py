"""Configs and special files that hang, fill the memory or end in a traceback where they are trusted.

`python hostile_inputs.py FOLDER` tries all of them in one process of limited memory and prints what became of each.
"""

import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

NAN, INF = float("nan"), float("inf")
TEXT = {"kind": "text", "encoder": "minilm", "width": 384, "tokens": 32}
UNET = {"sigma_data": 1.0, "t_max": 14.6, "image_shape": [4, 8, 8], "condition": TEXT}
CONFIGS: dict[str, dict[str, Any]] = {
    "blocks": {"network.blocks": 200_000},
    "many blocks": {"network.blocks": 10**9},
    "thousand blocks": {"network.blocks": 1000, "network.channel_mult": [1] * 3},
    "wide": {"network.channels": 10**9},
    "as wide as memory": {"network.channels": 2**40},
    "wider than any": {"network.channels": 2**70},
    "odd": {"network.channels": 10**9 + 1},
    "text for a width": {"network.channels": "8" * 10_000},
    "digits": {"network.channels": 10**4000},
    "levels": {"network.channel_mult": [1] * 33},
    "a hundred thousand levels": {"network.channel_mult": [1] * 100_000},
    "no level": {"network.channel_mult": []},
    "zero": {"network.channel_mult": [0, 1]},
    "negative": {"network.channel_mult": [-1, 1]},
    "wide level": {"network.channel_mult": [10**12]},
    "attention": {"network.attention": [1] * 100_000},
    "embedding": {"network.noise_mult": 10**9},
    "dropout": {"network.dropout": NAN},
    "all dropped": {"network.dropout": 1.0},
    "picture": {"image_shape": [1, 2**20, 2**20]},
    "tall picture": {"image_shape": [1, 2**30, 8]},
    "picture of many digits": {"image_shape": [1, 2**70, 2**70]},
    "channels": {"image_shape": [10**6, 8, 8]},
    "sides": {"image_shape": [1, 8, 8, 8]},
    "head": {"uncertainty": 10**9},
    "wider head": {"uncertainty": 2**70},
    "negative head": {"uncertainty": -1},
    "classes": {"condition": {"kind": "classes", "count": 10**9}},
    "more classes": {"condition": {"kind": "classes", "count": 2**70}},
    "names": {"condition": {"kind": "classes", "count": 10**9, "names": ["a"] * 100_000}},
    "no class": {"condition": {"kind": "classes", "count": 0}},
    "words": {"condition": TEXT | {"width": 10**9}},
    "tokens": {"condition": TEXT | {"tokens": 2**70}},
    "sigma": {"sigma_data": NAN},
    "infinite sigma": {"sigma_data": INF},
    "huge sigma": {"sigma_data": 1e300},
    "first time": {"t_min": NAN},
    "infinite first time": {"t_min": INF},
    "last time": {"t_max": NAN},
    "infinite last time": {"t_max": INF},
    "second time": {"sampler": {"kind": "consistency", "second_time": NAN}},
    "infinite second time": {"sampler": {"kind": "consistency", "second_time": INF}},
    "guidance": {"sampler": {"kind": "heun", "guidance": INF}},
    "shift": {"preconditioning": {"kind": "shifted", "epsilon": INF}},
    "latents": {"latents": {"kind": "vae", "vae": "x", "factor": 10**9}},
    "companion": {"companion": 5},
    "edm2": {"network": {"kind": "edm2", "channels": 10**9}},
    "edm2 blocks": {"network": {"kind": "edm2", "channel_mult": [1] * 30, "blocks": 10**6}},
    "patches": {"network": {"kind": "text_unet", "patch": 10**9}, "condition": TEXT},
    "heads": {"network": {"kind": "text_unet", "channels": 2**40, "heads": 2**40}, "condition": TEXT},
    "reading": {"network": {"kind": "text_unet", "cross_attention": [8] * 1000}, "condition": TEXT},
    "unet layers": UNET | {"network": {"kind": "diffusers_unet", "layers_per_block": 10**9}},
    "unet width": UNET | {"network": {"kind": "diffusers_unet", "block_out_channels": [10**9] * 4}},
    "unet levels": UNET | {"network": {"kind": "diffusers_unet", "down_block_types": ["DownBlock2D"] * 10_000}},
    "unet of nothing": UNET | {"network": {"kind": "diffusers_unet", "down_block_types": ["Nope"] * 4}},
    "unet transformers": UNET | {"network": {"kind": "diffusers_unet", "transformer_layers_per_block": 10**9}},
    "unet groups": UNET | {"network": {"kind": "diffusers_unet", "norm_num_groups": 10**9}},
    "lora": UNET | {"network": {"kind": "diffusers_unet", "lora": {"rank": 10**9}}},
    "lora targets": UNET | {"network": {"kind": "diffusers_unet", "lora": {"targets": ["x"] * 10_000}}},
    "timesteps": UNET | {"network": {"kind": "diffusers_unet", "noise": {"timesteps": 10**9}}},
    "extra": {"extra": {str(number): number for number in range(300_000)}},
    "keys": {str(number): number for number in range(100_000)},
}
RAW_CONFIGS = {
    "deep list": b"[" * 1_000_000,
    "deep table": b'{"a":' * 400_000,
    "spaces": b" " * 2**28,
    "number": b'{"format": ' + b"9" * 1_000_000 + b"}",
    "no text": b"\xff\xfe" * 1000,
    "nothing": b"",
    "list": b"[]",
}


def header(tensors: object, length: int | None = None) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(shape: list[int], start: int, end: int, kind: str = "F32") -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


WEIGHTS = {
    "claims a long header": header({}, 2**63),
    "claims a header of 90 MB": header({}, 90 * 10**6),
    "deep header": header(b"[" * 1_000_000),
    "overlapping": header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}) + bytes(12),
    "the same bytes": header({"a": tensor([2], 0, 8), "b": tensor([2], 0, 8)}) + bytes(8),
    "the same name": header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":5}') + bytes(8),
    "beyond the end": header({"a": tensor([2**40], 0, 2**42)}),
    "product overflows": header({"a": tensor([2**33, 2**33], 0, 8)}) + bytes(8),
    "empty and large": header({"a": tensor([0, 2**62, 2**62], 0, 0)}),
    "many empty": header({f"a{number}": tensor([0], 0, 0) for number in range(20_000)}),
    "unknown type": header({"a": tensor([2], 0, 8, "F1024")}) + bytes(8),
    "negative": header({"a": tensor([-1], 0, 8)}) + bytes(8),
    "nothing": b"",
}


@dataclass(frozen=True)
class Hostile:
    """One input: `make` puts it at a path that does not exist, `read` is given that path."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]


def special_files() -> dict[str, Callable[[Path], object]]:
    """What is no regular file, by what it is."""

    def bind(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            here = Path.cwd()
            os.chdir(path.parent)  # the name of a socket must be short
            listening.bind(path.name)
            os.chdir(here)

    return {
        "fifo": os.mkfifo,
        "endless": lambda path: path.symlink_to("/dev/zero"),
        "terminal": lambda path: path.symlink_to("/dev/tty"),
        "socket": bind,
        "folder": lambda path: path.mkdir(),
        "loop": lambda path: path.symlink_to(path.name),
    }


def inputs(model: Path, images: Path) -> Iterator[tuple[str, Hostile]]:
    """All of them: changes of a model's and of an image folder's copy."""
    import tcm
    from tcm.data import open_dataset, open_stream
    from tcm.weights.importing import import_checkpoint

    def in_copy(path: Path, *, of: Path, file: str, make: Callable[[Path], object]) -> None:
        shutil.copytree(of, path)
        if (path / file).exists():
            (path / file).unlink()
        make(path / file)

    def config(changes: dict[str, Any], path: Path) -> None:
        table = json.loads((model / "config.json").read_text())
        for key, value in changes.items():
            *parts, last = key.split(".")
            place = table
            for part in parts:
                place = place[part]
            place[last] = value
        path.write_text(json.dumps(table))

    def written(content: bytes, path: Path) -> None:
        path.write_bytes(content)

    def of_model(file: str, make: Callable[[Path], object]) -> Hostile:
        return Hostile(partial(in_copy, of=model, file=file, make=make), tcm.load)

    sys.set_int_max_str_digits(0)
    for name, changes in CONFIGS.items():
        yield f"config: {name}", of_model("config.json", partial(config, changes))
    for name, content in RAW_CONFIGS.items():
        yield f"config: {name}", of_model("config.json", partial(written, content))
    for name, content in WEIGHTS.items():
        yield f"weights: {name}", of_model("model.safetensors", partial(written, content))
        yield f"import: {name}", Hostile(partial(written, content), import_checkpoint)
    for name, make in special_files().items():
        for file in ("config.json", "model.safetensors"):
            yield f"{name}: {file}", of_model(file, make)
        for file in ("0.png", "labels.csv", "metadata.jsonl", "dataset.json"):
            if (name, file) == ("folder", "0.png"):
                continue  # images may lie in a folder of any name
            yield f"{name}: {file}", Hostile(partial(in_copy, of=images, file=file, make=make), open_dataset)
        for file in ("a.tar", "train-images-idx3-ubyte", "data_batch_1"):
            if name != "loop" or file == "a.tar":
                yield f"{name}: {file}", Hostile(partial(in_copy, of=images, file=file, make=make), open_dataset)
        yield f"{name}: stream", Hostile(partial(in_copy, of=images, file="a.tar", make=make), open_stream)
        yield f"{name}: import", Hostile(make, import_checkpoint)


class Hung(BaseException):
    """It took too long."""


def main(folder: Path) -> None:
    import resource

    import numpy as np
    from PIL import Image

    import tcm
    from tcm.foundation.errors import TcmError
    from tcm.weights import BUNDLED

    (images := folder / "images").mkdir()
    for number in range(2):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(images / f"{number}.png")
    every = dict(inputs(BUNDLED / "digits", images))
    tcm.load("digits")

    def hang(*_: object) -> None:
        raise Hung

    signal.signal(signal.SIGALRM, hang)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    outcomes = {}
    for number, (name, hostile) in enumerate(every.items()):
        path = folder / f"{number}{'.safetensors' if 'import' in name else ''}"
        hostile.make(path)
        begin = time.process_time()
        signal.alarm(20)
        try:
            hostile.read(path)
            outcome = "read"
        except TcmError as error:
            outcome = f"refused: {error}"
        except (Exception, Hung) as error:
            outcome = f"{type(error).__name__}: {error}"
        signal.alarm(0)
        outcomes[name] = [outcome[:500], time.process_time() - begin]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
