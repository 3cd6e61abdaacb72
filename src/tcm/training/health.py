"""Signs that a run will not learn, or has not learned, what it should: each one line with a remedy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tcm.data import Dataset, Stream
from tcm.data.mirroring import mirrors
from tcm.data.summary import sampled_deviation
from tcm.method.averaging import ConstantDecay
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Stage

SIGMA_FACTOR = 1.5
"""A sigma_data further from the data's deviation than this factor scales the network's inputs badly."""
SPANS = 3
"""Spans of 1/(1 - decay) steps that an average needs, until its first weights no longer count: e^-3 is 5 %."""
FEATURELESS = 0.3
"""Samples that vary less than this share of the data's variation are featureless; trained models give 0.8 or more."""

WARNING, FEATURELESS_EVENT, COLLAPSE_EVENT = "warning", "featureless", "collapse"


def warnings_at_start(recipe: Recipe, name: str, data: Dataset | Stream, sigma_data: float) -> list[str]:
    """What is wrong with a stage before its first step; what concerns all stages is said in the first.

    Only data in memory is looked at: no run should wait for two thousand images that it may not need yet.
    """
    found = long_averages(name, recipe.stages[name]) + uncompiled_tangents(name, recipe.stages[name])
    if name == next(iter(recipe.stages)) and isinstance(data, Dataset) and data.in_memory and data.latents is None:
        found += wrong_sigma_data(sigma_data, data) if recipe.latents is None else []
        found += wrong_mirroring(data) if recipe.data.flip else []
    return found


def long_averages(name: str, stage: Stage) -> list[str]:
    """Averages that still remember the first weights at the end: 1/(1 - decay) above a third of the steps."""
    found = []
    for decay in stage.averages:
        if isinstance(decay, ConstantDecay) and SPANS / (1 - decay.decay) > stage.steps:
            longest = 1 - SPANS / stage.steps if stage.steps > SPANS else 0.0
            found.append(
                f"{name}.averages: decay={decay.decay:g} averages over {1 / (1 - decay.decay):,.0f} steps, too many "
                f"for steps={stage.steps:,}: the model will be close to its first weights; use a decay of at most "
                f"{longest:.4g}, a power average, or more steps"
            )
    return found


def uncompiled_tangents(name: str, stage: Stage) -> list[str]:
    """A pass that `compile` does not reach."""
    if not (stage.compile and stage.rows().tangent):
        return []
    return [f"{name}.compile=true compiles the pass with gradient, but not the tangent pass, which would lose tangents"]


def wrong_sigma_data(sigma_data: float, dataset: Dataset) -> list[str]:
    """A sigma_data that is not the data's."""
    deviation = sampled_deviation(dataset)
    if deviation == 0:
        return ["all pixels of the data have the same value: there is nothing to learn; look at `tcm data info`"]
    if max(sigma_data / deviation, deviation / sigma_data) <= SIGMA_FACTOR:
        return []
    return [
        f"sigma_data={sigma_data:g} is far from the data's standard deviation, {deviation:.2g}; "
        f"set sigma_data={deviation:.2g}"
    ]


def wrong_mirroring(dataset: Dataset) -> list[str]:
    """Images that have a left and a right."""
    test = mirrors(dataset)
    if test.safe:
        return []
    return [
        f"data.flip=true mirrors images that have a left and a right: a linear classifier tells {test.group} from "
        f"their mirror images in {test.accuracy:.0%} of cases; set data.flip=false"
    ]


@dataclass(frozen=True)
class Variation:
    """How much images vary: from one to the next at a pixel, and from pixel to pixel within one."""

    spread: float
    contrast: float

    @classmethod
    def of(cls, images: Tensor) -> "Variation":
        """Of images [n, C, H, W] in [-1, 1]."""
        return cls(float(images.std(0).mean()), float(images.flatten(1).std(1).mean()))


def featurelessness(samples: Variation, data: Variation) -> str | None:
    """What is wrong with samples that hardly vary although the data does; None if nothing is.

    >>> featurelessness(Variation(0.05, 0.4), Variation(0.6, 0.5))
    'the samples differ from each other by 0.05, the data by 0.6: this stage has not learned; train it longer'
    """
    for what, own, of_data in (
        ("differ from each other by", samples.spread, data.spread),
        ("are flat: their pixels differ by", samples.contrast, data.contrast),
    ):
        if own < FEATURELESS * of_data:
            return (
                f"the samples {what} {own:.2g}, the data by {of_data:.2g}: this stage has not learned; train it longer"
            )
    return None


def warnings_in(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The warnings in a stage's metrics that still hold: those of its start, and those of its newest samples."""
    newest = max((int(line["step"]) for line in lines if "spread" in line), default=0)
    return [
        str(line["reason"])
        for line in lines
        if line.get("event") == WARNING
        or (line.get("event") in (FEATURELESS_EVENT, COLLAPSE_EVENT) and int(line["step"]) == newest)
    ]
