"""What rounding does to consistency training: cosines with IEEE fp32, for the digits model of the package."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode

import tcm
from benchmarks.harness import Row, Settings, spread
from tcm.data import open_dataset, to_float
from tcm.foundation.randomness import SampleStreams, derive_seed
from tcm.method.conditions import Labels
from tcm.method.curriculum import Curriculum
from tcm.method.objectives import Batch
from tcm.method.preconditioning import Denoiser, column
from tcm.recipes.resolve import resolve

TITLE = "cosines with IEEE fp32 of f(x_t) − f(x_r), and of the gradient, for the shipped digits model"
RATIOS, TIMES = (0.9961, 0.999), (0.05, 1.0, 5.0, 40.0)
ROUNDS, IMAGES = 5, 256
FP32_ITSELF = "IEEE fp32 with fp64, all of these ratios and times: 1 − cosine of f(x_t) − f(x_r)"


class EmulatedTF32(TorchDispatchMode):
    """Rounds the operands of products, forward and backward, to TF32's 10 bits of mantissa."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.overloadpacket in PRODUCTS:
            args = [round_to_tf32(one) if isinstance(one, Tensor) else one for one in args]
        return operation(*args, **(kwargs or {}))


aten = torch.ops.aten
PRODUCTS = {aten.convolution, aten.convolution_backward, aten.addmm, aten.mm, aten.bmm, aten.baddbmm}


def round_to_tf32(x: Tensor) -> Tensor:
    """To nearest, ties to even, by the 13 bits that TF32 has not."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


PRECISIONS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "TF32 (emulated)": EmulatedTF32,
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", torch.float16),
}


Found = dict[str, list[float]]


def measure(settings: Settings) -> list[Row]:
    f, x, labels = digits(16 if settings.quick else IMAGES)
    found: Found = {}
    for number in range(settings.rounds(ROUNDS)):
        compare_pairs(found, f, x, labels, number)
        compare_gradients(found, f, x, labels, number)
    return [spread(what, values, "") for what, values in sorted(found.items(), key=by_precision)]


def by_precision(item: tuple[str, list[float]]) -> list[str]:
    """Ratio or stage, then precision, then t as it came: the order in which the rows are read."""
    return item[0].split(", ")[:3]


def compare_pairs(found: Found, f: Denoiser, x: Tensor, labels: Labels, number: int) -> None:
    eps = streams(number, len(x)).normal(x.shape[1:])
    for ratio, t in product(RATIOS, TIMES):
        exact = difference(f, x, eps, labels, t, ratio)
        for name, precision in PRECISIONS.items():
            with precision():
                rounded = difference(f, x, eps, labels, t, ratio)
            what = f"f(x_t) − f(x_r), ratio {ratio}, {name}, t = {t:g}"
            found.setdefault(what, []).append(mean_cosine(exact, rounded))
        truth = in_float64(f, x, eps, labels, t, ratio)
        found.setdefault(FP32_ITSELF, []).append(1 - mean_cosine(exact, truth))


def compare_gradients(found: Found, f: Denoiser, x: Tensor, labels: Labels, number: int) -> None:
    for recipe, stage in product(("imagenet64-s", "cifar10"), ("consistency", "truncated")):
        exact = gradient(f, x, labels, recipe, stage, number)
        for name, precision in PRECISIONS.items():
            with precision():
                rounded = gradient(f, x, labels, recipe, stage, number)
            what = f"gradient, objective of {recipe} {stage}, {name}"
            found.setdefault(what, []).append(float(cosine_similarity(exact, rounded, dim=0)))


def digits(count: int) -> tuple[Denoiser, Tensor, Labels]:
    dataset = open_dataset("digits")
    pixels, labels = dataset.read(np.random.default_rng(0).permutation(dataset.count)[:count])
    assert isinstance(labels, Labels)
    return tcm.load("digits").denoiser, to_float(torch.from_numpy(pixels)), labels


def streams(number: int, count: int) -> SampleStreams:
    return SampleStreams([derive_seed("noise", number, index) for index in range(count)])


@torch.no_grad()
def difference(f: Denoiser, x: Tensor, eps: Tensor, labels: Labels | None, t: float, ratio: float) -> Tensor:
    """f(x_t, t) − f(x_r, r) of a stage that holds `ratio`."""
    times = torch.full((len(x),), t, dtype=torch.float64)
    earlier = times - Curriculum(d=0, limit=ratio).delta(times, 0)
    one, other = (f(x + column(at, x) * eps, at, labels) for at in (times, earlier))
    return (one - other).flatten(1)


def in_float64(f: Denoiser, x: Tensor, eps: Tensor, labels: Labels, t: float, ratio: float) -> Tensor:
    """The same in float64: how far IEEE fp32 itself is from the truth."""
    # A denoiser turns everything into float32 by itself.
    with patch.object(Tensor, "float", Tensor.double):
        return difference(copy.deepcopy(f).double(), x.double(), eps.double(), labels, t, ratio)


def gradient(f: Denoiser, x: Tensor, labels: Labels, recipe_name: str, stage: str, number: int) -> Tensor:
    """Of a recipe's objective at its last step, with the digits model as the student and as the frozen model."""
    recipe = resolve(recipe_name)
    objective = recipe.stages[stage].build(recipe)
    student, frozen = copy.deepcopy(f).requires_grad_(True), copy.deepcopy(f).requires_grad_(False)
    last = recipe.stages[stage].steps - 1
    models = {"student": student, "frozen": frozen}
    losses = objective.loss(models, Batch.whole(x, labels), last, streams(number, len(x)))
    torch.autograd.backward(losses.total)
    return torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])


def mean_cosine(a: Tensor, b: Tensor) -> float:
    return float(cosine_similarity(a.double(), b.double(), eps=0.0).nan_to_num(0.0).mean())
