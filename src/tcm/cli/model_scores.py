"""What `tcm eval` measures of a model: whose images are drawn, for which conditions, and what looks at them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from tcm.cli.scoring import ReferenceData
from tcm.data.latents import seen_by
from tcm.evaluation.clip_score import ClipScore, load_clip
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import Metric, evaluate, model_subject, needs_reference_features
from tcm.evaluation.features import Detector
from tcm.evaluation.generation import Conditions, Sampling, conditions_of, generate, resized
from tcm.evaluation.prompts import conditions_from, read_prompts
from tcm.evaluation.references import PAPERS_COUNT, Reference
from tcm.evaluation.retrieval import retrieval_scores
from tcm.evaluation.scores import Score
from tcm.evaluation.sharing import share
from tcm.foundation.counting import counter
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.networks import ImageShape
from tcm.text.condition import Texts
from tcm.weights import Model


@dataclass(frozen=True)
class Drawn:
    """The prompts of a file, one for each image, and what a score records of them."""

    prompts: list[str]
    first_seed: int
    record: str

    @staticmethod
    def of(path: Path, seed: int, count: int | None) -> Drawn:
        """The first `count` prompts of a file."""
        every = read_prompts(path)
        prompts = every[:count]
        digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
        some = f"{len(every):,}" if prompts == every else f"first {len(prompts):,} of {len(every):,}"
        return Drawn(prompts, seed, f", {some} prompts of {path.name} ({digest[:8]})")

    def texts(self, seeds: Sequence[int]) -> list[str]:
        """The prompts of these seeds."""
        return [self.prompts[(own - self.first_seed) % len(self.prompts)] for own in seeds]


@dataclass(frozen=True)
class Asked:
    """The options of `tcm eval` for a model."""

    source: ReferenceData
    metrics: tuple[Metric, ...]
    samplings: tuple[Sampling, ...]
    seed: int
    count: int | None
    batch: int
    reference_count: int | None
    dfid: tuple[float, ...] = ()
    data_conditions: bool = False
    prompts: Path | None = None
    guidance: float | None = None
    resize: int | None = None
    clip: str | None = None
    retrieval: bool = False

    def __post_init__(self) -> None:
        choice = self.samplings[0].choice
        if choice is not None and self.data_conditions:
            raise TcmError(f"--class {choice} and --data-conditions both set the conditions; give one of them")
        if self.prompts is not None and (choice is not None or self.data_conditions):
            raise TcmError(
                f"--prompts {self.prompts} cannot be combined with --class or --data-conditions; give one of them"
            )
        if self.clip is not None and self.prompts is None:
            raise TcmError(f"--clip {self.clip} compares images with prompts; give --prompts too")

    def check_images(self, target: str) -> None:
        """Refuse what only a model can be asked for."""
        only = (self.prompts, self.guidance, self.resize)
        drawn = self.samplings != (Sampling(),) or self.data_conditions or self.retrieval or self.dfid
        if drawn or any(given is not None for given in only):
            raise TcmError(
                f"{target} holds images; --steps, --times, --class, --data-conditions, --dfid, --prompts, --guidance, "
                "--resize and --retrieval are for models"
            )

    def reference(self, shape: ImageShape, detector: Detector, processes: Processes) -> Reference:
        """What images of this shape are compared with."""
        keep = needs_reference_features(self.metrics) or self.retrieval
        return self.source.reference(shape, detector, keep, self.batch, processes, self.reference_count)


def check_prompted(model: Model, given: bool, remedy: str) -> None:
    """Refuse to measure a text model with its own few prompts: they are not those of the data."""
    if isinstance(model.card.condition, Texts) and not given:
        raise TcmError(
            f"the model takes texts, and its own {len(model.card.condition.prompts)} prompts are not those of the "
            f"data: a distance between them would mean nothing; give {remedy}"
        )


def scores_of_model(model: Model, name: str, asked: Asked, detector: Detector, processes: Processes) -> list[Score]:
    """All that was asked for, with progress bars."""
    given = asked.data_conditions or asked.prompts is not None or asked.samplings[0].choice is not None
    check_prompted(model, given, "--prompts FILE, or --data-conditions for the data's own captions")
    model = model if asked.guidance is None else model.guided(asked.guidance)
    needed = asked.dfid or asked.data_conditions or asked.retrieval
    dataset = asked.source.dataset(model.card.condition) if needed else None
    shape, side = model.card.picture_shape, asked.resize
    reference = asked.reference(shape if side is None else (shape[0], side, side), detector, processes)
    condition = conditions_of(dataset) if dataset is not None and asked.data_conditions else None
    found: list[Score] = []
    for sampling in asked.samplings:
        found += score_samples(model, name, asked, sampling, reference, processes, condition)
        if dataset is not None and asked.retrieval:
            found += retrieval_scores(model, name, dataset, reference, sampling, asked.seed, asked.count, asked.batch)
    if dataset is not None and asked.dfid:
        f, subject = model_denoise(model), model_subject(model, name, None, asked.seed)
        seen = seen_by(dataset, model.card.latents)
        found += denoising_distances(
            f, seen, asked.dfid, reference, subject, asked.count, asked.batch, processes, counter(processes)
        )
    return found


def score_samples(
    model: Model,
    name: str,
    asked: Asked,
    sampling: Sampling,
    reference: Reference,
    processes: Processes,
    condition: Conditions | None = None,
) -> list[Score]:
    """Measure a model's samples; `condition` gives those of the data."""
    drawn = None if asked.prompts is None else Drawn.of(asked.prompts, asked.seed, asked.count)
    usual = PAPERS_COUNT if drawn is None else len(drawn.prompts)
    seeds = range(asked.seed, asked.seed + (asked.count or usual))
    if drawn is not None:
        condition = conditions_from(model, drawn.prompts, drawn.first_seed)
    own = share(processes, seeds)
    images: Iterable[Tensor] = generate(model, own, sampling, asked.batch, condition)
    images = counter(processes)(images, len(own), "sampling")
    record = "" if drawn is None else drawn.record
    if asked.resize is not None:
        images = resized(images, asked.resize)
        record += f", resized to {asked.resize}×{asked.resize} (Lanczos)"
    subject = model_subject(model, name, sampling, asked.seed, given=condition is not None)
    subject = replace(subject, sampling=f"{subject.sampling}{record}")
    if asked.clip is None or drawn is None:
        return evaluate(images, reference, subject, asked.metrics, processes)
    clip = ClipScore(load_clip(asked.clip, processes.device))
    found = evaluate(clip.watching(images, drawn.texts(own)), reference, subject, asked.metrics, processes)
    return [*found, clip.score(found[0], processes, len(seeds))]
