"""Latents of images, and embeddings of their captions, written ahead of training."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tcm.data.captions import AT_ONCE
from tcm.data.dataset import Annotations, Broken
from tcm.data.decode import decode_picture, pixels_of
from tcm.data.encoded import CAPTIONS, LABELS, LATENTS, MASK, NULL, TOKENS, Contents
from tcm.data.labels import DATASET_JSON
from tcm.data.pixels import to_float
from tcm.data.prepare import Prepared, check_target
from tcm.foundation.errors import TcmError
from tcm.foundation.files import new_folder
from tcm.text.autoencoders import Latents
from tcm.text.condition import Texts

PER_PART = 128 * AT_ONCE


def write_encoded(
    target: Path,
    images: Iterable[Prepared],
    annotations: Annotations | None,
    latents: Latents,
    texts: Texts | None,
    device: torch.device,
) -> tuple[int, list[Broken]]:
    """Write the latents of prepared images, with their classes and captions, into a new folder.

    With `texts`, the captions' embeddings too. Return the number of images written and those left out.
    """
    check_target(target)
    skipped: list[Broken] = []
    usable = _usable(images, skipped)
    counts: list[int] = []
    shape: tuple[int, ...] = ()
    with new_folder(target) as folder:
        while chunk := list(islice(usable, PER_PART)):
            part = folder / f"part-{len(counts):06d}"
            part.mkdir()
            encoded = _latents(chunk, latents, device)
            np.save(part / LATENTS, encoded)
            _write_annotations(part, annotations, [image.number for image in chunk], texts)
            counts.append(len(chunk))
            shape = encoded.shape[1:]
        if not counts:
            raise TcmError(f"none of {len(skipped)} images can be read; the first one: {skipped[0].reason}")
        if texts is not None:
            null = texts.encode([])
            np.savez(folder / NULL, tokens=null.null_tokens.half().numpy(), mask=null.null_mask.numpy())
        names = () if annotations is None or annotations.classes is None else annotations.classes.names
        contents = Contents(
            parts=tuple(counts), shape=cast(Any, shape), latents=latents, class_names=names, texts=texts
        )
        (folder / DATASET_JSON).write_text(contents.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return sum(counts), skipped


def _latents(images: Sequence[Prepared], latents: Latents, device: torch.device) -> NDArray[np.float16]:
    encoded = []
    for image in images:
        pixels = pixels_of(decode_picture(image.png, image.name), 3)[None]
        encoded.append(latents.encode(to_float(torch.from_numpy(pixels).to(device))).cpu().numpy())
    return np.concatenate(encoded)


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
        encoder = texts.load_encoder()
        found = [
            encoder.encode(captions[start : start + AT_ONCE], texts.tokens, warn=False)
            for start in range(0, len(captions), AT_ONCE)
        ]
        np.save(part / TOKENS, torch.cat([some.tokens for some in found]).half().numpy())
        np.save(part / MASK, torch.cat([some.mask for some in found]).numpy())


def _usable(images: Iterable[Prepared], skipped: list[Broken]) -> Iterator[Prepared]:
    for image in images:
        if image.broken:
            skipped.append(image.broken)
        else:
            yield image
