"""A recipe for other data than it was written for: shape, classes and sigma_data as the data has them."""

import tomllib
from dataclasses import asdict

import numpy as np

from tcm.data import Dataset
from tcm.data.opening import STREAM, open_dataset
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Classes
from tcm.recipes.resolve import recipe_of, to_toml
from tcm.recipes.schema import Recipe

SAMPLE = 2000
"""Images that sigma_data is measured on."""
CLOSE = 0.1
"""A sigma_data that is off by a smaller share is left as it is."""


def adapted(recipe: Recipe) -> Recipe:
    """The recipe with what its data has, if it `adapts`; otherwise the recipe itself. Streams are not adapted to."""
    if not recipe.adapts or recipe.data.path.startswith(STREAM):
        return recipe
    data = open_dataset(recipe.data.path, channels=recipe.data.channels, memory_limit=0)
    kind, measured = data.condition_kind, sigma_data(data)
    changes = {
        "image_shape": list(data.shape),
        "classes": kind.count if isinstance(kind, Classes) else None,
        "condition": None if kind is None or isinstance(kind, Classes) else asdict(kind),
        "conditional": recipe.conditional and kind is not None,
        "sigma_data": recipe.sigma_data if abs(measured / recipe.sigma_data - 1) < CLOSE else measured,
    }
    try:
        return recipe_of(tomllib.loads(to_toml(recipe)) | changes, recipe.name)
    except TcmError as error:
        raise TcmError(f"data.path={recipe.data.path} does not fit: {error}") from error


def sigma_data(data: Dataset) -> float:
    """The standard deviation of the pixels of a sample of the images in [−1, 1], to two digits."""
    indices = np.sort(np.random.default_rng(0).permutation(data.count)[:SAMPLE])
    return max(0.01, round(float(data.pixels(indices).std()) / 127.5, 2))
