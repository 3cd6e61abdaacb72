"""The two sizes that everything is measured at, and trainers for their stages with random images."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness import Settings
from tcm.data.dataset import ArrayDataset, ClassLabels
from tcm.data.loader import Batches, LoadedBatch
from tcm.foundation.processes import Processes
from tcm.method.conditions import ConditionKind
from tcm.method.preconditioning import Denoiser
from tcm.recipes.lineage import condition_of, network_of, roles_of
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import Recipe
from tcm.training.metrics import time_bins
from tcm.training.trainer import Trainer

ALONE = Processes(torch.device("cpu"))


@dataclass(frozen=True)
class Case:
    """A recipe's stages 1 and 2 as trained from data, without a teacher, or distilled from one."""

    name: str
    recipe_name: str
    batch: int
    channels: int
    teacher: str = "none"

    def recipe(self, *overrides: str) -> Recipe:
        """The recipe with this batch."""
        settings = (f"batch={self.batch}", f"teacher={self.teacher}")
        both = [f"{stage}.{setting}" for stage in ("consistency", "truncated") for setting in settings]
        return resolve(self.recipe_name, [*both, f"network.channels={self.channels}", *overrides])

    @property
    def size(self) -> str:
        return f"{self.name}, batch {self.batch}"


def ddpmpp(settings: Settings) -> Case:
    """The paper's DDPM++ for CIFAR-10: 55.7 M parameters, dropout 0.2."""
    if settings.quick:
        return Case("DDPM++ of 32 channels", "cifar10", 8, channels=32)
    return Case("DDPM++", "cifar10", 8, channels=128)


def small(settings: Settings) -> Case:
    """The network of `cifar10-small`: 4 M parameters."""
    return Case("cifar10-small", "cifar10-small", 8 if settings.quick else 64, channels=32)


def denoiser(recipe: Recipe, stage: str) -> Denoiser:
    """A fresh student of a stage."""
    assert recipe.image_shape is not None
    condition = network_condition(recipe)
    network = network_of(recipe, recipe.stages[stage]).build(recipe.image_shape, condition)
    return Denoiser(network, recipe.image_shape, condition)


def network_condition(recipe: Recipe) -> ConditionKind | None:
    """What the networks of a recipe are conditioned on."""
    return condition_of(recipe) if recipe.conditional else None


def trainer(recipe: Recipe, stage: str, processes: Processes = ALONE) -> Trainer:
    """A trainer at step 0."""
    roles = roles_of(recipe, stage)
    models = {name: denoiser(recipe, stage).requires_grad_(role.trained) for name, role in roles.items()}
    return Trainer(
        recipe.stages[stage],
        recipe.stages[stage].build(recipe),
        models,
        roles,
        processes,
        seed=(0, stage),
        bin_edges=time_bins(recipe.t_min, recipe.t_max),
    )


def batches(recipe: Recipe, stage: str, processes: Processes = ALONE) -> Batches:
    """Random images in memory."""
    assert recipe.image_shape is not None
    rng = np.random.default_rng(0)
    labels = ClassLabels.of(rng.integers(0, recipe.classes, 2000), "random") if recipe.classes else None
    dataset = ArrayDataset(rng.integers(0, 256, (2000, *recipe.image_shape), dtype=np.uint8), labels)
    share = (processes.rank, processes.count)
    return Batches(dataset, seed=0, batch=recipe.stages[stage].batch, flip=True, rank=share[0], world=share[1])


def images(recipe: Recipe, stage: str, processes: Processes = ALONE) -> Iterator[LoadedBatch]:
    """Batches of random images, from the first step on."""
    return batches(recipe, stage, processes).starting_at(0)
