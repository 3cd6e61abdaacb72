"""Any iterable of uint8 image batches in, scores with all their conditions out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, get_args

from torch import Tensor

from tcm.evaluation import inception_weights
from tcm.evaluation.features import Detector, weights_hash
from tcm.evaluation.formulas import inception_score, kernel_distance, precision_recall
from tcm.evaluation.generation import Conditions, Sampling, generate
from tcm.evaluation.measurement import COVARIANCE, Measurement, Subject
from tcm.evaluation.references import Observed, Reference, observe
from tcm.evaluation.scores import ConditionSource, Kind, Score
from tcm.evaluation.sharing import ALONE, share
from tcm.evaluation.statistics import extrapolated_distance
from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import data_folder
from tcm.foundation.processes import Processes
from tcm.weights import Model

Metric = Literal["fid", "fid-infinity", "kid", "is", "precision-recall"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def needs_reference_features(metrics: Sequence[Metric]) -> bool:
    """Whether a metric looks at single images of the reference and not only at their statistics."""
    return "kid" in metrics or "precision-recall" in metrics


def check_detector(detector: Detector, metrics: Sequence[Metric]) -> None:
    """Refuse an Inception score without classes now rather than after hours of sampling."""
    if "is" in metrics and detector.head is None:
        raise TcmError(
            f"the detector {detector.name!r} has no class head, so it cannot give an Inception score; put the public "
            f"{inception_weights.FILE} into {data_folder()} or give its path as the detector"
        )


def evaluate(
    images: Iterable[Tensor],
    reference: Reference,
    subject: Subject,
    metrics: Sequence[Metric] = ("fid",),
    processes: Processes = ALONE,
) -> list[Score]:
    """Score uint8 batches [n, C, H, W] against a reference; under torchrun each process gives its share of the images.

    >>> reference = reference_of(open_dataset("digits"), "digits", load_detector("digits"))  # doctest: +SKIP
    >>> evaluate([images], reference, Subject("mine", hash="…"))[0].value  # doctest: +SKIP
    """
    check_detector(reference.detector, metrics)
    if reference.features is None and needs_reference_features(metrics):
        raise TcmError(
            f"{reference.name} holds only mu and sigma, but KID, precision and recall need features; give a data set"
        )
    keep = any(metric != "fid" for metric in metrics)
    observed = observe(images, reference.detector, keep, processes)
    measurement = Measurement(subject, reference, observed.count)
    values = [value for metric in metrics for value in _values(metric, observed, measurement)]
    return [
        replace(score, value=value, deviation=deviation)
        for score, (value, deviation) in zip(expected_scores(measurement, metrics), values, strict=True)
    ]


def expected_scores(measurement: Measurement, metrics: Sequence[Metric]) -> list[Score]:
    """The scores that a measurement gives, still without their values."""
    detector = measurement.reference.detector
    name, own, choice = detector.distance_name, detector.name == "inception", _choice(measurement.reference)
    parts: dict[Metric, list[tuple[Kind, str, str]]] = {
        "fid": [("fid", name, COVARIANCE)],
        "fid-infinity": [("fid-infinity", f"{name}∞", "line through 8 sizes over 1/N")],
        "is": [("is", "Inception score" if own else f"class score in {detector.name}", "10 splits")],
        "kid": [
            ("kid", "KID" if own else f"kernel distance in {detector.name}", f"100 subsets of at most 1,000{choice}")
        ],
        "precision-recall": [
            ("precision", "precision", f"3 neighbours{choice}"),
            ("recall", "recall", f"3 neighbours{choice}"),
        ],
    }
    return [measurement.score(*part) for metric in metrics for part in parts[metric]]


def _values(metric: Metric, observed: Observed, measurement: Measurement) -> list[tuple[float, float | None]]:
    """The values of a metric's scores, and their deviations."""
    reference, features = measurement.reference, observed.features
    detector = reference.detector
    if metric == "fid":
        return [(measurement.distance(observed), None)]
    assert features is not None, "kept for every other metric"
    if metric == "fid-infinity":
        return [(extrapolated_distance(features, reference.statistics), None)]
    if metric == "is":
        found = inception_score(detector.probabilities(features))
        return [(found.mean, found.deviation)]
    assert reference.features is not None, "checked before the images were seen"
    if metric == "kid":
        found = kernel_distance(features, reference.features)
        return [(found.mean, found.deviation)]
    coverage = precision_recall(features.to(detector.device), reference.features.to(detector.device))
    return [(coverage.precision, None), (coverage.recall, None)]


def _choice(reference: Reference) -> str:
    """How many of the reference's images are looked at one by one, if not all."""
    count = None if reference.features is None else len(reference.features)
    return "" if count in (None, reference.statistics.count) else f", {count:,} of the reference's images"


def evaluate_model(
    model: Model,
    name: str,
    seeds: Sequence[int],
    sampling: Sampling,
    reference: Reference,
    metrics: Sequence[Metric] = ("fid",),
    batch: int = 64,
    processes: Processes = ALONE,
    condition: Conditions | None = None,
) -> list[Score]:
    """Score a model's samples, one for each seed; `condition` gives those of seeds, such as a data set's captions.

    >>> model = tcm.load("digits")  # doctest: +SKIP
    >>> evaluate_model(model, "digits", range(2000), Sampling(steps=1), reference)[0].value  # doctest: +SKIP
    """
    subject = model_subject(model, name, sampling, seeds[0], given=condition is not None)
    images = generate(model, share(processes, seeds), sampling, batch, condition)
    return evaluate(images, reference, subject, metrics, processes)


def model_subject(
    model: Model, name: str, sampling: Sampling | None, seed: int, given: bool = False, step: int | None = None
) -> Subject:
    """A model as what is measured, known by the hash of its weights.

    Without `sampling`, it is its denoising that is measured; `given` conditions are neither drawn nor chosen. `step` is
    that of a checkpoint.
    """
    digest = weights_hash(model.denoiser.state_dict())
    if sampling is None:
        return Subject(name, digest, step, seed=seed)
    conditions: ConditionSource | None = None
    if model.card.condition is not None:
        conditions = "given" if given else "drawn" if sampling.choice is None else "chosen"
    return Subject(name, digest, step, sampling.describe(model), seed, conditions)
