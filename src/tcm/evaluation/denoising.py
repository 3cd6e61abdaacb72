"""dFID_t: how well a model still denoises at each time. TCM Sec. 2.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tcm.data import Dataset, to_float
from tcm.evaluation.generation import quantise
from tcm.evaluation.measurement import COVARIANCE, Measurement, Subject
from tcm.evaluation.references import Reference, chosen_images, observe
from tcm.evaluation.scores import Score
from tcm.evaluation.sharing import ALONE, share
from tcm.foundation.counting import Counter, uncounted
from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.foundation.randomness import SampleStreams, derive_seed
from tcm.method.conditions import Condition
from tcm.weights import Model

ConditionalDenoise = Callable[[Tensor, Tensor, Condition | None], Tensor]
"""(x, t, condition) ↦ the clean images; the condition is the data's, None if it has none."""


def model_denoise(model: Model) -> ConditionalDenoise:
    """A model's f(x, t) as images, under the data's condition if the model takes one."""
    device = next(model.denoiser.parameters()).device

    def denoise(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        kind = model.card.condition
        if kind is not None and (condition is None or not kind.takes(condition)):
            found = "has none" if condition is None else f"has {type(condition).__name__} that do not fit"
            raise TcmError(f"the model takes {kind}, but the data {found}; give data annotated with {kind}")
        given = None if kind is None or condition is None else condition.to(device)
        return model.pictures(model.denoiser(x.to(device), t.to(device), given)).cpu()

    return denoise


def denoising_distances(
    f: ConditionalDenoise,
    dataset: Dataset,
    times: Sequence[float],
    reference: Reference,
    subject: Subject,
    count: int | None = None,
    batch: int = 64,
    processes: Processes = ALONE,
    counter: Counter = uncounted,
) -> list[Score]:
    """dFID_t for each t: the distance between the data and f(x + t ε, t) over `count` images of the data.

    By default 50,000 images, as in the paper, or all if there are fewer. Image i has the same ε at every t, in every
    batch and process. Times below a truncated model's t' are allowed: that it forgets to denoise there is what the
    paper shows.

    >>> denoising_distances(model_denoise(model), dataset, [0.2, 1.0, 5.0], reference, subject)  # doctest: +SKIP
    """
    chosen = chosen_images(dataset.count, count).tolist()
    measurement = Measurement(subject, reference, len(chosen))
    scores = []
    for t in times:
        if not t > 0:
            raise TcmError(f"t={t:g} is not a noise level; use a positive time")
        own = share(processes, chosen)
        images = _denoised(f, dataset, own, t, subject.seed or 0, batch)
        seen = counter(images, len(own), f"denoising at t={t:g}")
        value = measurement.distance(observe(seen, reference.detector, processes=processes))
        scores.append(replace(expected_denoising(measurement, t), value=value))
    return scores


def expected_denoising(measurement: Measurement, t: float) -> Score:
    """The score of dFID_t, still without its value."""
    detector = measurement.reference.detector
    name = "dFID" if detector.name == "inception" else f"denoised {detector.distance_name}"
    return measurement.score("fid", name, COVARIANCE, t=t)


def _denoised(
    f: ConditionalDenoise, dataset: Dataset, indices: Sequence[int], t: float, seed: int, batch: int
) -> Iterator[Tensor]:
    for start in range(0, len(indices), batch):
        some = indices[start : start + batch]
        pixels, condition = dataset.read(np.asarray(some))
        x = to_float(torch.from_numpy(pixels))
        eps = SampleStreams([derive_seed("denoise", seed, index) for index in some]).normal(x.shape[1:])
        with torch.no_grad(), fp32_products("ieee"):
            denoised = f(x + t * eps, torch.full((len(x),), t), condition)
        yield quantise(denoised)
