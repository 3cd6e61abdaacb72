"""The same images in every format, written without the code under test."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("apple", "banana", "cherry")


def sample_pixels(count: int = 23, channels: int = 3, height: int = 32, width: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), dtype=np.uint8)


def sample_labels(count: int = 23) -> np.ndarray:
    return np.arange(count) % 3


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_zip(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def numbered(images: np.ndarray) -> dict[str, bytes]:
    return {f"{number:05d}.png": png(image) for number, image in enumerate(images)}


def with_csv(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    lines = [f"{number:05d}.png,{CLASSES[label]}" for number, label in enumerate(labels)]
    return {**numbered(images), "labels.csv": "\n".join(["file,label", *lines]).encode()}


def with_edm_json(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    files = {f"00000/img{number:08d}.png": png(image) for number, image in enumerate(images)}
    pairs = [[name, int(label)] for name, label in zip(files, labels, strict=True)]
    return {**files, "dataset.json": json.dumps({"labels": pairs}).encode()}


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray, zipped: bool) -> Path:
    folder.mkdir()
    for name, array in (("train-images-idx3-ubyte", images[:, 0]), ("train-labels-idx1-ubyte", labels)):
        data = idx_bytes(array)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)
    return folder


def write_cifar_python(folder: Path, images: np.ndarray, labels: np.ndarray, parts: int = 2) -> Path:
    """Protocol 2 with byte strings as keys, as the published files have them."""
    folder.mkdir()
    for number, places in enumerate(np.array_split(np.arange(len(images)), parts), start=1):
        batch = {b"data": images[places].reshape(len(places), -1), b"labels": labels[places].tolist()}
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def write_cifar_binary(folder: Path, images: np.ndarray, labels: np.ndarray, parts: int = 2) -> Path:
    folder.mkdir()
    for number, places in enumerate(np.array_split(np.arange(len(images)), parts), start=1):
        records = [
            bytes([label]) + image.tobytes() for image, label in zip(images[places], labels[places], strict=True)
        ]
        (folder / f"data_batch_{number}.bin").write_bytes(b"".join(records))
    return folder


def write_shards(folder: Path, images: np.ndarray, labels: np.ndarray | None, per_shard: int = 8) -> Path:
    folder.mkdir()
    for start in range(0, len(images), per_shard):
        with tarfile.open(folder / f"part-{start // per_shard:04d}.tar", "w") as shard:
            for number in range(start, min(start + per_shard, len(images))):
                members = {f"{number:06d}.png": png(images[number])}
                if labels is not None:
                    members[f"{number:06d}.cls"] = str(labels[number]).encode()
                for name, data in members.items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    shard.addfile(entry, io.BytesIO(data))
    return folder


def write_hugging_face(folder: Path, images: np.ndarray, labels: np.ndarray, parquet: bool = False) -> Path:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    cells = [{"bytes": png(image), "path": None} for image in images]
    rows = datasets.Dataset.from_dict({"image": cells, "label": labels.tolist()}, features=features)
    if parquet:
        folder.mkdir()
        rows.to_parquet(folder / "train.parquet")
    else:
        datasets.disable_progress_bars()
        rows.save_to_disk(folder)
    return folder
