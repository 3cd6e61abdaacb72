"""How long a step takes on this machine: real steps of a stage, with fresh weights."""

import time
from functools import partial

from tcm.data import Batches, Dataset
from tcm.foundation.processes import Processes
from tcm.foundation.threads import Threads, threads_restored, usable_counts
from tcm.recipes.lineage import roles_of
from tcm.recipes.schema import Recipe
from tcm.training.metrics import time_bins
from tcm.training.stage_models import card_of
from tcm.training.trainer import Trainer
from tcm.weights import Model


def fresh_trainer(recipe: Recipe, name: str, dataset: Dataset, processes: Processes) -> Trainer:
    """A stage's trainer with newly initialised models in all roles."""
    stage, roles = recipe.stages[name], roles_of(recipe, name)
    card = card_of(recipe, name, dataset.shape, dataset.condition_kind if recipe.conditional else None)
    wide = card.model_copy(update={"t_min": recipe.t_min, "t_max": recipe.t_max})  # as helpers are defined
    cards = {key: card if key == "student" else wide for key in roles}
    models = {key: Model.fresh(own).to(processes.device).denoiser for key, own in cards.items()}
    for key, model in models.items():
        model.learn(roles[key].trained)
    bins = time_bins(recipe.t_min, recipe.t_max)
    return Trainer(stage, stage.build(recipe), models, roles, processes, seed=(0, name), bin_edges=bins)


def seconds_per_step(recipe: Recipe, name: str, dataset: Dataset, processes: Processes, patience: float) -> float:
    """The time of the fastest of a stage's steps, made for `patience` seconds: one if it is long, else three or more.

    The fastest, because warming up and other programs can only make a step slower.
    """
    stage, trainer = recipe.stages[name], fresh_trainer(recipe, name, dataset, processes)
    batches = Batches(dataset, seed=0, batch=stage.batch, flip=recipe.data.flip)
    taken: list[float] = []
    with threads_restored():
        threads = Threads(usable_counts(processes))
        threads.settle(partial(trainer.rehearse, 0, batches.at(0)), stage.batch)
        while sum(taken) < patience or (len(taken) < 3 and max(taken) < patience):
            loaded = batches.at(len(taken))
            begin = time.perf_counter()
            threads.begin()
            trainer.step(len(taken), loaded)
            taken.append(time.perf_counter() - begin)
    return min(taken)
