"""The batches that a stage trains on."""

from tcm.data import Batches, BatchSource, Dataset, Stream, StreamBatches
from tcm.data.latents import EncodedBatches
from tcm.foundation.processes import Processes
from tcm.recipes.schema import Recipe


def batches_of(recipe: Recipe, batch: int, data: Dataset | Stream, processes: Processes) -> BatchSource:
    """This process's share of batches of `batch` images; encoded where the network takes latents and they are not."""
    source = _stored(recipe, batch, data, processes)
    if recipe.latents is None or data.latents is not None:
        return source
    return EncodedBatches(source, recipe.latents, processes.device)


def _stored(recipe: Recipe, batch: int, data: Dataset | Stream, processes: Processes) -> BatchSource:
    seed, spec, rank, world = recipe.seed, recipe.data, processes.rank, processes.count
    if isinstance(data, Dataset):
        return Batches(data, seed=seed, batch=batch, flip=spec.flip, rank=rank, world=world, workers=spec.workers)
    return StreamBatches(
        data,
        seed=seed,
        batch=batch,
        flip=spec.flip,
        rank=rank,
        world=world,
        workers=spec.workers,
        lanes=spec.lanes,
        window=spec.window,
    )
