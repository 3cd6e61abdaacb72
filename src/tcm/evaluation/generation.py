"""Images from a model, batch by batch: the same image for the same seed however the work is split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tcm.data import Dataset, to_uint8
from tcm.data.decode import picture_of, pixels_of
from tcm.foundation.devices import free_memory
from tcm.foundation.errors import Diverged, TcmError
from tcm.foundation.randomness import derive_seed
from tcm.method.conditions import Condition
from tcm.weights import Model

MOST_SEEDS = 1_000_000
MOST_AT_ONCE = 256


@dataclass(frozen=True)
class Sampling:
    """How images are drawn: `steps`, or the `times` themselves (a consistency model's), the condition
    that a user chose for all images (a class), the precision."""

    steps: int | None = None
    times: tuple[float, ...] | None = None
    choice: int | str | None = None
    precision: Literal["fp32", "bf16"] = "fp32"

    def describe(self, model: Model) -> str:
        """One line for a score's record, such as `times 80, 1` or `Heun, 18 steps, 35 evaluations`."""
        text = model.sampler.describe(model.denoiser, self.steps, self.times)
        kind = model.card.condition
        if kind is not None and self.choice is not None:
            text += f", {kind.captions(kind.choose(self.choice, 1))[0]}"
        return f"{text}, {self.precision}"


def sampling_batch(model: Model, memory: int | None = None) -> int:
    """How many images to make at once: what surely fits into `memory` bytes (a quarter of what is free), at most 256.

    The images do not depend on it, and beyond a few dozen their speed hardly does.
    """
    if memory is None:
        memory = free_memory(next(model.denoiser.parameters()).device) // 4
    return max(1, min(MOST_AT_ONCE, memory // bytes_per_image(model)))


def bytes_per_image(model: Model) -> int:
    """Bytes that all modules put out for one image: more than sampling ever holds at once."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes)

    hooks = [module.register_forward_hook(note) for module in model.denoiser.modules()]
    f, kind = model.denoiser, model.card.condition
    device = next(f.parameters()).device
    condition = None if kind is None else kind.dummy(1).to(device)
    try:
        with torch.no_grad():
            f(torch.zeros(1, *f.image_shape, device=device), torch.full((1,), f.t_max), condition)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes)


Conditions = Callable[[Sequence[int]], Condition]
"""The condition of each image, from its seed."""


def conditions_of(dataset: Dataset) -> Conditions:
    """The conditions of a data set, each as frequent as in it: a seed takes that of an image that it chooses."""
    annotations = dataset.annotations
    if annotations is None:
        raise TcmError("the data has no classes or other annotations to take conditions from; use annotated data")

    def conditions(seeds: Sequence[int]) -> Condition:
        return annotations.condition(np.array([derive_seed("condition", seed) % dataset.count for seed in seeds]))

    return conditions


def generate(
    model: Model,
    seeds: Sequence[int],
    sampling: Sampling,
    batch: int | None = None,
    condition: Conditions | None = None,
) -> Iterator[Tensor]:
    """uint8 batches [n, C, H, W], one image for each seed: clamp(127.5 x + 128) truncated, as the papers quantise.

    Without a `condition` and without a choice in `sampling`, the model's kind of condition draws them from the seeds.
    """
    batch = sampling_batch(model) if batch is None else batch
    if batch < 1:
        raise TcmError(f"batch={batch} must be at least 1")
    device = next(model.denoiser.parameters()).device
    for start in range(0, len(seeds), batch):
        some = seeds[start : start + batch]
        with torch.autocast(device.type, torch.bfloat16, enabled=sampling.precision == "bf16"):
            images = model.sample(
                steps=sampling.steps,
                times=sampling.times,
                seeds=some,
                labels=sampling.choice,
                condition=None if condition is None else condition(some),
                batch=batch,
            )
        yield quantise(images)


def resized(batches: Iterable[Tensor], side: int) -> Iterator[Tensor]:
    """uint8 batches scaled to squares of this side, by Pillow's Lanczos filter."""
    for batch in batches:
        pictures = [picture_of(pixels.cpu().numpy()) for pixels in batch]
        scaled = [picture.resize((side, side), Image.Resampling.LANCZOS) for picture in pictures]
        yield torch.from_numpy(np.stack([pixels_of(picture, batch.shape[1]) for picture in scaled]))


def quantise(images: Tensor) -> Tensor:
    """uint8 pixels of images in [-1, 1]; NaN, which a cast would turn into some grey, is an error."""
    broken = ~torch.isfinite(images).flatten(1).all(1)
    if bool(broken.any()):
        raise Diverged(
            f"{int(broken.sum())} of {len(images)} images hold NaN or infinity; the model has diverged: "
            "go back to an earlier checkpoint"
        )
    return to_uint8(images)


def parse_times(text: str, option: str = "times") -> tuple[float, ...]:
    """Times written as `80,1`; errors name the option.

    >>> parse_times("80,1")
    (80.0, 1.0)
    """
    try:
        times = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise TcmError(f"{option}={text!r} is not a list of numbers; write them as 80,1") from error
    if not all(math.isfinite(t) and t > 0 for t in times):
        raise TcmError(f"{option}={text!r} must be positive; write them as 80,1")
    return times


def parse_seeds(text: str) -> list[int]:
    """Seeds written as `0-63`, `7` or `0-3,10,12`.

    >>> parse_seeds("0-2,10")
    [0, 1, 2, 10]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise TcmError(f"seeds={text!r} is not a list of seeds; write them as 0-63 or 0-3,10")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high >= 2**63:
            raise TcmError(f"seeds={text!r}: {part.strip()} runs backwards or beyond 2^63; write them as 0-63")
        if len(seeds) + high - low >= MOST_SEEDS:
            raise TcmError(f"seeds={text!r} has more than {MOST_SEEDS:,} seeds; draw them in several runs")
        seeds.extend(range(low, high + 1))
    if len(set(seeds)) != len(seeds):
        raise TcmError(f"seeds={text!r} names a seed twice, which would give the same image twice")
    return seeds
