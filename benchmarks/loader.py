"""How fast batches arrive, compared with how fast the fastest training step here could use them up.

The step is a bare forward and backward pass of the recipe's network: real steps take longer, so the ratios are lower
bounds. CIFAR-10 is fetched once (`tcm data fetch cifar10`).
"""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import Row, Settings
from tcm.data import Batches, Dataset, fetch_dataset, open_dataset, prepare_dataset, to_float
from tcm.data.prepare import Form
from tcm.method.conditions import Classes
from tcm.recipes.resolve import resolve

TITLE = "batches arriving against batches used up"


def measure(settings: Settings) -> list[Row]:
    digits = open_dataset("digits")
    cifar10 = open_dataset(fetch_dataset("cifar10").path)
    arriving = {
        "digits in memory": loader_speed(settings, digits, batch=128),
        "cifar10 in memory": loader_speed(settings, cifar10, batch=512),
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cifar10.zip"
        prepare_dataset(cifar10, path, Form())
        zipped = open_dataset(path, memory_limit=0)
        for workers in (0, 1, 2):
            name = f"cifar10 from a zip, {workers} workers"
            arriving[name] = loader_speed(settings, zipped, batch=512, workers=workers)
    used = {"digits": step_speed(settings, "digits", 128), "cifar10": step_speed(settings, "cifar10-small", 64)}
    rows = [Row(f"{name}: arriving", speed, "images/s") for name, speed in arriving.items()]
    rows += [Row(f"{name}: bare training step", speed, "images/s") for name, speed in used.items()]
    return rows + [
        Row(f"{name}: arriving / used up", speed / used[name.split()[0]], "×", goal="≥ 1")
        for name, speed in arriving.items()
    ]


def loader_speed(settings: Settings, dataset: Dataset, batch: int, workers: int = 0) -> float:
    """Images per second into the training step: read, mirrored and converted to float."""
    batches = Batches(dataset, seed=0, batch=batch, flip=True, workers=workers).starting_at(0)
    for loaded in islice(batches, 4):  # workers start up, the first permutation is drawn
        to_float(loaded.images)
    return rate(settings, lambda: len(to_float(next(batches).images)))


def step_speed(settings: Settings, recipe_name: str, batch: int) -> float:
    """Images per second of one forward and backward pass of a recipe's network."""
    recipe = resolve(recipe_name)
    classes = Classes(recipe.classes)
    network = recipe.network.build(recipe.image_shape, classes)
    x = torch.randn(batch, *recipe.image_shape)
    labels = classes.spread(batch)

    def step() -> int:
        network(x, torch.zeros(batch), labels, None).square().mean().backward()
        return batch

    step()
    return rate(settings, step)


def rate(settings: Settings, run: Callable[[], int]) -> float:
    """Images per second of a run that returns how many images it took, over two seconds."""
    started, images = settings.now(), 0
    while settings.now() - started < (0.5 if settings.quick else 2.0):
        images += run()
    return images / (settings.now() - started)
