"""Latents of images, and embeddings of their captions, written ahead of training, part by part.

The parts are collected in a folder beside the target, which takes its place once all are there. What an interruption
leaves of it is continued by the same command.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from tcm.data.captions import AT_ONCE
from tcm.data.dataset import Annotations, Broken
from tcm.data.decode import decode_picture, pixels_of
from tcm.data.encoded import CAPTIONS, LABELS, LATENTS, MASK, NULL, TOKENS, Contents
from tcm.data.labels import DATASET_JSON
from tcm.data.pixels import to_float
from tcm.data.prepare import Prepared, check_target
from tcm.foundation.errors import TcmError
from tcm.foundation.files import new_folder, publish, write_text
from tcm.text.autoencoders import Latents
from tcm.text.condition import Texts

PER_PART = 128 * AT_ONCE
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Encoders:
    """What reads the images and, perhaps, the captions; and where."""

    latents: Latents
    texts: Texts | None
    device: torch.device

    def settings(self) -> dict[str, str]:
        """All of it that the numbers depend on."""
        texts = "none" if self.texts is None else f"{self.texts.encoder_hash}, {self.texts.tokens} tokens"
        return {"autoencoder": self.latents.vae_hash, "text encoder": texts, "device": self.device.type}


class Progress(BaseModel):
    """progress.json: what the parts that are there were made of."""

    model_config = ConfigDict(frozen=True)

    settings: dict[str, str]
    parts: tuple[int, ...] = ()
    """The images of each."""
    following: int = 0
    """The number of the first image in the source that is in none of them."""
    skipped: tuple[Broken, ...] = ()


def write_encoded(
    target: Path,
    images: Callable[[int], Iterable[Prepared]],
    annotations: Annotations | None,
    encoders: Encoders,
    settings: Mapping[str, str],
    per_part: int = PER_PART,
) -> tuple[int, list[Broken]]:
    """Write the latents of prepared images, with their classes and captions, into a new folder.

    `images` gives those from a number on; `settings` says what they are and how they were prepared. With an encoder of
    texts, the captions' embeddings are written too. Return the number of images written and those left out.
    """
    check_target(target)
    content = b"" if annotations is None else annotations.content()
    said = {**settings, **encoders.settings(), "annotations": hashlib.sha256(content).hexdigest()}
    folder = unfinished(target)
    with _only_one(folder):
        progress = _begun(folder, {**said, "images per part": str(per_part)})
        arriving = iter(images(progress.following))
        while True:
            part, progress = _next_part(arriving, encoders, progress, per_part)
            if not part.numbers:
                break
            with new_folder(_part(folder, len(progress.parts) - 1)) as aside:
                np.save(aside / LATENTS, part.latents[: len(part.numbers)])
                _write_annotations(aside, annotations, part.numbers, encoders.texts)
            write_text(folder / PROGRESS, progress.model_dump_json(indent=2))
        if not progress.parts:
            raise TcmError(
                f"none of {len(progress.skipped)} images can be read; the first one: {progress.skipped[0].reason}"
            )
        _finish(folder, target, annotations, encoders, progress)
    return sum(progress.parts), list(progress.skipped)


def unfinished(target: Path) -> Path:
    """The folder that collects the parts of a target."""
    return target.with_name(f"{target.name}.part")


@dataclass(frozen=True)
class _Part:
    latents: NDArray[np.float16]
    numbers: list[int]


def _next_part(images: Iterator[Prepared], encoders: Encoders, progress: Progress, size: int) -> tuple[_Part, Progress]:
    """Encode images as they arrive; the progress is that after them."""
    latents: NDArray[np.float16] = np.empty((0,), np.float16)
    numbers: list[int] = []
    skipped, following = list(progress.skipped), progress.following
    while len(numbers) < size and (image := next(images, None)) is not None:
        following = image.number + 1
        if image.broken:
            skipped.append(image.broken)
            continue
        pixels = pixels_of(decode_picture(image.png, image.name), 3)[None]
        encoded = encoders.latents.encode(to_float(torch.from_numpy(pixels).to(encoders.device)))
        if not numbers:
            latents = np.empty((size, *encoded.shape[1:]), np.float16)
        latents[len(numbers)] = encoded[0].cpu().numpy()
        numbers.append(image.number)
    parts = (*progress.parts, len(numbers)) if numbers else progress.parts
    changed = {"parts": parts, "following": following, "skipped": tuple(skipped)}
    return _Part(latents, numbers), progress.model_copy(update=changed)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}"


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Keep other processes from writing the same latents; what has no part yet is not worth keeping."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise TcmError(f"{folder} is being written by another process; wait for it, or choose another name") from error
    try:
        yield
    finally:
        if not any(folder.glob("part-*")):
            shutil.rmtree(folder, ignore_errors=True)
        path.unlink(missing_ok=True)
        lock.release()


def _begun(folder: Path, settings: dict[str, str]) -> Progress:
    """What an interrupted command with the same settings has left; nothing in most cases."""
    path = folder / PROGRESS
    if not folder.exists():
        folder.mkdir()
        write_text(path, Progress(settings=settings).model_dump_json(indent=2))
    try:
        found = Progress.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TcmError(f"{folder} is not the beginning of a folder of latents; move it away") from error
    if not found.parts:
        found = Progress(settings=settings)
    for key, value in settings.items():
        if found.settings.get(key) != value:
            raise TcmError(
                f"{folder} was started with another {key} ({found.settings.get(key, 'none')}, now {value}); give the "
                "same options to continue it, or remove it"
            )
    for leftover in folder.glob(".*"):  # what was being written
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return found


def _finish(
    folder: Path, target: Path, annotations: Annotations | None, encoders: Encoders, progress: Progress
) -> None:
    if encoders.texts is not None:
        null = encoders.texts.encode([])
        np.savez(folder / NULL, tokens=null.null_tokens.half().numpy(), mask=null.null_mask.numpy())
    shapes = {np.load(_part(folder, n) / LATENTS, mmap_mode="r").shape[1:] for n in range(len(progress.parts))}
    if len(shapes) > 1:
        raise TcmError(f"{folder} has latents of different shapes, {sorted(shapes)}; remove it and give --size")
    contents = Contents(
        parts=progress.parts,
        shape=cast(Any, shapes.pop()),
        latents=encoders.latents,
        class_names=() if annotations is None or annotations.classes is None else annotations.classes.names,
        texts=encoders.texts,
    )
    write_text(folder / DATASET_JSON, contents.model_dump_json(indent=2) + "\n")
    publish(folder, target)
    (target / PROGRESS).unlink()


def _write_annotations(part: Path, annotations: Annotations | None, numbers: list[int], texts: Texts | None) -> None:
    if annotations is None:
        return
    if annotations.classes is not None:
        np.save(part / LABELS, annotations.classes.values[numbers])
    if annotations.texts is None:
        return
    captions = [annotations.texts[number] for number in numbers]
    (part / CAPTIONS).write_text(json.dumps(captions, ensure_ascii=False), encoding="utf-8")
    if texts is not None:
        found = texts.load_encoder().encode(captions, texts.tokens, warn=False)
        np.save(part / TOKENS, found.tokens.half().numpy())
        np.save(part / MASK, found.mask.numpy())
