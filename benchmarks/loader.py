"""How fast batches arrive, beside how fast the fastest training step here could use them up.

The step is a bare forward and backward pass of the recipe's network: real steps take longer, so the ratios are lower
bounds. CIFAR-10 is fetched once (`tcm data fetch cifar10`). Run it with `python -m benchmarks.loader`.
"""

import json
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tcm.data import Batches, Dataset, fetch_dataset, open_dataset, prepare_dataset, to_float
from tcm.data.prepare import Form
from tcm.networks import build_network
from tcm.recipes.resolve import resolve

SECONDS = 3.0


def measure() -> dict[str, float]:
    """Images per second: loaders and training steps, and the ratios between them."""
    digits = open_dataset("digits")
    cifar10 = open_dataset(fetch_dataset("cifar10").path)
    figures = {
        "digits in memory": loader_speed(digits, batch=128),
        "cifar10 in memory": loader_speed(cifar10, batch=512),
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cifar10.zip"
        prepare_dataset(cifar10, path, Form())
        zipped = open_dataset(path, memory_limit=0)
        for workers in (0, 1, 2):
            figures[f"cifar10 from a zip, {workers} workers"] = loader_speed(zipped, batch=512, workers=workers)
    figures["digits training step"] = step_speed("digits", batch=128)
    figures["cifar10-small training step"] = step_speed("cifar10-small", batch=64)
    figures["ratio digits"] = figures["digits in memory"] / figures["digits training step"]
    figures["ratio cifar10"] = figures["cifar10 in memory"] / figures["cifar10-small training step"]
    figures["ratio cifar10 from a zip"] = (
        figures["cifar10 from a zip, 1 workers"] / figures["cifar10-small training step"]
    )
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def loader_speed(dataset: Dataset, batch: int, workers: int = 0) -> float:
    """Images per second into the training step: read, mirrored and converted to float."""
    batches = Batches(dataset, seed=0, batch=batch, flip=True, workers=workers).starting_at(0)
    for loaded in islice(batches, 4):  # workers start up, the first permutation is drawn
        to_float(loaded.images)
    started, images = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        images += len(to_float(next(batches).images))
    return images / (time.perf_counter() - started)


def step_speed(recipe_name: str, batch: int) -> float:
    """Images per second of one forward and backward pass of a recipe's network."""
    recipe = resolve(recipe_name)
    network = build_network(recipe.network, recipe.image_shape, recipe.classes)
    x = torch.randn(batch, *recipe.image_shape)
    labels = torch.zeros(batch, dtype=torch.int64)
    network(x, torch.zeros(batch), labels, None).square().mean().backward()
    started, images = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        network(x, torch.zeros(batch), labels, None).square().mean().backward()
        images += batch
    return images / (time.perf_counter() - started)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
