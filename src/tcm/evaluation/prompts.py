"""Prompts: from the command line or a file, and the images that a model draws for them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tcm.evaluation.generation import Conditions, Sampling, quantise, sampling_batch
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.method.conditions import Condition
from tcm.text.condition import Texts
from tcm.weights import Model


@dataclass(frozen=True)
class Prompted:
    """One image to draw: its prompt and its seed."""

    prompt: str
    seed: int
    folder: str
    """A name for the images of its prompt: `02-red-apple`."""

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.folder}/{self.seed:06d}.png"


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: one a line; of a .json a list of texts, or COCO's `annotations` with their `caption`."""
    try:
        text = path.read_text("utf-8-sig")
        found = _from_json(json.loads(text)) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise TcmError(
            f"{path} cannot be read as prompts ({error}); give a text file with one prompt per line"
        ) from error
    prompts = [" ".join(prompt.split()) for prompt in found or ()]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise TcmError(f"{path} holds no prompts; write one per line, or a JSON list of texts, or COCO's annotations")
    return prompts


def _from_json(content: object) -> list[str] | None:
    if isinstance(content, dict):
        content = content.get("annotations")
    if not isinstance(content, list):
        return None
    texts = [row.get("caption") if isinstance(row, dict) else row for row in content]
    return [text for text in texts if isinstance(text, str)] if all(isinstance(text, str) for text in texts) else None


def prompted(prompts: Sequence[str], seeds: Sequence[int]) -> list[Prompted]:
    """Each prompt with each seed.

    >>> [one.file for one in prompted(["a red apple!"], [0, 1])]
    ['00-a-red-apple/000000.png', '00-a-red-apple/000001.png']
    """
    digits = max(2, len(str(len(prompts) - 1)))
    folders = [f"{number:0{digits}d}-{_slug(prompt)}" for number, prompt in enumerate(prompts)]
    return [Prompted(prompt, seed, folder) for prompt, folder in zip(prompts, folders, strict=True) for seed in seeds]


def _slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40]


def draw(
    model: Model, wanted: Sequence[Prompted], sampling: Sampling, negative: str | None, batch: int | None
) -> Iterator[Tensor]:
    """uint8 batches [n, C, H, W]: an image depends on its prompt and its seed alone."""
    batch = sampling_batch(model) if batch is None else batch
    device = next(model.denoiser.parameters()).device
    for start in range(0, len(wanted), batch):
        some = wanted[start : start + batch]
        with torch.autocast(device.type, torch.bfloat16, enabled=sampling.precision == "bf16"):
            images = model.sample(
                steps=sampling.steps,
                times=sampling.times,
                seeds=[one.seed for one in some],
                prompts=[one.prompt for one in some],
                negative=negative,
                batch=batch,
            )
        yield quantise(images)


def conditions_from(model: Model, prompts: Sequence[str], seed: int) -> Conditions:
    """The prompts as conditions: the first belongs to `seed`, the next to the seed after it, and from the start again
    if there are more seeds than prompts."""
    kind = model.card.condition
    if kind is None or not kind.takes_prompts:
        raise TcmError(f"prompts given, but this model takes {kind or 'no condition'}; leave them out")
    if isinstance(kind, Texts):
        kind.warn_of_cuts(prompts)

    def conditions(seeds: Sequence[int]) -> Condition:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TcmWarning)  # of all prompts at once, not of each batch's
            return kind.choose([prompts[(own - seed) % len(prompts)] for own in seeds], len(seeds))

    return conditions
