"""A recipe for other data, or another pipeline, than it was written for takes what differs from there."""

import tomllib
from collections.abc import Set

from tcm.data import Dataset, Stream
from tcm.data.opening import STREAM, open_dataset
from tcm.data.summary import sampled_deviation
from tcm.foundation.errors import TcmError
from tcm.method.conditions import ConditionKind
from tcm.networks import ImageShape
from tcm.recipes.lineage import condition_keys, condition_of
from tcm.recipes.resolve import recipe_of, to_toml
from tcm.recipes.schema import Recipe
from tcm.text.pipeline_folders import find_pipeline
from tcm.training.stage_models import check_init
from tcm.weights import inspect

CLOSE = 0.1
"""A sigma_data that is off by a smaller share is left as it is."""


def adapted(recipe: Recipe, given: Set[str] = frozenset()) -> Recipe:
    """The recipe with what its data has, if it `adapts`; otherwise the recipe itself.

    The keys that the user has `given` stay as they are. Streams are not adapted to.
    """
    if not recipe.adapts or recipe.data.path.startswith(STREAM):
        return recipe
    data = open_dataset(recipe.data.path, channels=recipe.data.channels, memory_limit=0)
    kind, measured = data.condition_kind, sigma_data(data)
    changes = {
        "image_shape": list(data.shape),
        **({"classes": None, "condition": None} | ({} if kind is None else condition_keys(kind))),
        "conditional": recipe.conditional and kind is not None,
        "sigma_data": recipe.sigma_data if abs(measured / recipe.sigma_data - 1) < CLOSE else measured,
    }
    try:
        changes = {key: value for key, value in changes.items() if key not in given}
        return recipe_of(tomllib.loads(to_toml(recipe)) | changes, recipe.name)
    except TcmError as error:
        raise TcmError(f"data.path={recipe.data.path} does not fit: {error}") from error


def fitted_to(recipe: Recipe, init: str | None, given: Set[str] = frozenset()) -> Recipe:
    """The recipe for the pipeline that a run starts from: its UNet, texts, latents and noise; else the recipe itself.

    The keys that the user has `given`, how the UNet is trained, and the recipe's prompts stay as they are.
    """
    if init is None or not recipe.network.comes_with_pipeline:
        return recipe
    check_init(recipe, frozenset(), init)
    if find_pipeline(init) is None:
        return recipe
    card, own = inspect(init), tomllib.loads(to_toml(recipe))
    keys = {"image_shape", "condition", "latents", "sigma_data", "t_max", "network"}
    if not card.sampler.generates_at_once:
        keys.add("t_min")  # a consistency model's own may be a t', not where the pipeline's noise begins
    changes = card.model_dump(mode="json", include=keys)
    kept = {*given, *(f"network.{key}" for key in recipe.network.free_keys), "condition.prompts", "condition.negative"}
    for key in kept:
        table, _, name = key.partition(".")
        if name and table in changes:
            changes[table] |= {name: own[table][name]} if name in own.get(table, {}) else {}
    changes = {key: value for key, value in changes.items() if key not in given}
    return recipe_of(own | changes, recipe.name)


def sigma_data(data: Dataset) -> float:
    """The standard deviation of the pixels of a sample of the images in [−1, 1], to two digits."""
    return max(0.01, round(sampled_deviation(data), 2))


def shape_of(recipe: Recipe, data: Dataset | Stream) -> ImageShape:
    """What the network takes of this data: the shape of its images or, where they are encoded, of their latents."""
    wanted, stored = recipe.latents, data.latents
    if stored is None:
        return data.shape if wanted is None else wanted.of_images(data.shape)
    if wanted is None:
        raise TcmError(
            f"data.path={recipe.data.path} has {stored}, but the recipe trains on pixels; "
            f"set latents.vae={stored.vae!r}"
        )
    if stored.vae_hash != wanted.vae_hash and wanted.vae_hash:
        raise TcmError(
            f"data.path={recipe.data.path} has {stored}, but latents is {wanted}; encode the images again with "
            f"`tcm data prepare --latents {wanted.vae}`"
        )
    if recipe.data.flip:
        raise TcmError("data.flip=true cannot mirror latents that were computed ahead; set data.flip=false")
    return data.shape


def check_data(recipe: Recipe, data: Dataset | Stream) -> ConditionKind | None:
    """Check that the data is what the recipe says; returns the condition that the network is given."""
    shape = shape_of(recipe, data)
    if recipe.image_shape is not None and shape != recipe.image_shape:
        encoded = "" if shape == data.shape else f" (latents {list(shape)})"
        raise TcmError(
            f"data.path={recipe.data.path} has images of shape {list(data.shape)}{encoded}, but image_shape is "
            f"{list(recipe.image_shape)}; prepare the data with `tcm data prepare` or change image_shape"
        )
    expected = condition_of(recipe)
    found = data.condition_kind if recipe.conditional or expected is not None else None
    lacking = "classes or other annotations" if expected is None else expected.annotations
    if recipe.conditional and found is None:
        raise TcmError(
            f"conditional=true, but data.path={recipe.data.path} has no {lacking}; add them or set conditional=false"
        )
    settled = found if expected is None or found is None else expected.settle(found)
    if expected is not None and settled is None:
        has = f"no {lacking}" if found is None else found
        said = f"condition is {expected}" if recipe.classes is None else f"classes={recipe.classes}"
        raise TcmError(f"data.path={recipe.data.path} has {has}, but {said}; correct one of them")
    return settled if recipe.conditional else None
