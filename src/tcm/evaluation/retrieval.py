"""Does a text give the image that belongs to it? The nearest image of the data to each generated one."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from tcm.data import Dataset
from tcm.data.dataset import Indices
from tcm.evaluation.evaluate import model_subject
from tcm.evaluation.generation import Sampling
from tcm.evaluation.measurement import Measurement
from tcm.evaluation.prompts import Prompted, draw
from tcm.evaluation.references import Reference, chosen_images
from tcm.evaluation.scores import Kind, Score
from tcm.foundation.errors import TcmError
from tcm.weights import Model

ROWS = 256
"""Images whose distances to the whole data set are computed at once."""


def retrieval_scores(
    model: Model,
    name: str,
    dataset: Dataset,
    reference: Reference,
    sampling: Sampling,
    seed: int = 0,
    count: int | None = None,
    batch: int = 64,
) -> list[Score]:
    """How often the nearest image, in the reference's features, has the caption that an image was drawn for, and how
    often its class; one image for each of the data's captions, or of `count` of them."""
    captions, labels, gallery = dataset.captions, dataset.class_labels, reference.features
    if captions is None:
        raise TcmError(f"{reference.name} has no captions, which retrieval needs; use captioned data")
    if gallery is None or len(gallery) != dataset.count:
        raise TcmError(
            f"{reference.name} has {dataset.count:,} images; retrieval takes at most 50,000 of them, and all"
        )
    chosen = chosen_images(dataset.count, count)
    wanted = [Prompted(captions[index], seed + number, "") for number, index in enumerate(chosen.tolist())]
    found = torch.cat([reference.detector.features(images) for images in draw(model, wanted, sampling, None, batch)])
    nearest = nearest_images(found, gallery)
    subject = model_subject(model, name, sampling, seed, given=True)
    measurement = Measurement(subject, reference, len(chosen))
    hits = [captions[own] == captions[other] for own, other in zip(chosen.tolist(), nearest.tolist(), strict=True)]
    scores = [_share(measurement, "retrieval", "caption of the nearest image", sum(hits))]
    if labels is not None:
        same = int((labels.values[nearest] == labels.values[chosen]).sum())
        scores.append(_share(measurement, "class-retrieval", "class of the nearest image", same))
    return scores


def nearest_images(features: Tensor, gallery: Tensor) -> Indices:
    """The index of the nearest row of the gallery, for each row of features."""
    return torch.cat([torch.cdist(some, gallery).argmin(1) for some in torch.split(features, ROWS)]).numpy()


def _share(measurement: Measurement, kind: Kind, metric: str, hits: int) -> Score:
    count = measurement.count
    share = hits / count
    settings = f"one image for each of {count:,} captions, Euclidean distance"
    return measurement.score(kind, metric, settings, share, sqrt(share * (1 - share) / count))
