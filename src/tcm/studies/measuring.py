"""A variant's scores: of its final model and, where the study asks for curves, of each kept checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from tcm.data import Dataset, open_dataset
from tcm.data.latents import seen_by
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import Metric, evaluate, model_subject, needs_reference_features
from tcm.evaluation.features import check_known, load_detector, weights_hash
from tcm.evaluation.generation import Sampling, generate, sampling_batch
from tcm.evaluation.references import Reference, chosen_images, reference_of
from tcm.evaluation.scores import Score, append_scores, read_scores
from tcm.foundation.counting import Batches
from tcm.foundation.fetching import data_folder
from tcm.foundation.locks import locked
from tcm.foundation.progress import SentProgress
from tcm.foundation.signals import Stopped, StopRequest, until_stopped
from tcm.foundation.workers import Send
from tcm.method.sampling import Sampler
from tcm.recipes.folders import SCORES_FILE, stage_folders
from tcm.recipes.lineage import condition_of
from tcm.recipes.schema import Recipe
from tcm.studies.folders import MEASURED_FILE
from tcm.studies.schema import Study, Variant, metric_parts
from tcm.training.checkpoint import averaged_model, kept_checkpoints
from tcm.training.stage_models import companion_source, sources_before
from tcm.weights import Model
from tcm.weights.card import CONFIG_FILE, read_card

LOCK_FILE = ".measuring.lock"
"""In a stage's folder: variants that share the stage do not measure it twice."""


def check_measure(study: Study, recipe: Recipe) -> None:
    """Find out what cannot be measured before anything is trained."""
    measure = study.measure
    for detector in filter(None, (measure.detector, measure.curve_detector)):
        check_known(detector)
    if measure.data is not None:
        open_dataset(measure.data, expected=condition_of(recipe))


@dataclass(frozen=True)
class Subject:
    """A model to measure: that of a stage, or of the stage's checkpoint at `step`; the name in its scores says which.

    >>> Subject("consistency", None, 5000).name, Subject("consistency", 300, 1000).name
    ('consistency', 'consistency@300')
    """

    stage: str
    step: int | None
    count: int

    @property
    def name(self) -> str:
        """The stage's name, with the step of a checkpoint."""
        return self.stage if self.step is None else f"{self.stage}@{self.step}"


@dataclass(frozen=True)
class _Wanted:
    """One pass over images: the samples of so many steps, or the data denoised at t."""

    steps: int | None = None
    t: float | None = None


@dataclass(frozen=True)
class _Bench:
    """What all measurements of a variant share."""

    dataset: Dataset
    reference: Reference
    metrics: Sequence[Metric]
    first_seed: int

    def identities(self, wanted: _Wanted, model: Model, count: int) -> list[tuple[object, ...]]:
        """What tells the scores of one pass from all others, except for the subject's name."""
        kinds = [part for metric in self.metrics for part in metric_parts(metric)] if wanted.t is None else ["fid"]
        sampling = None if wanted.t is not None else Sampling(steps=wanted.steps).describe(model)
        images = count if wanted.t is None else len(chosen_images(self.dataset.count, count))
        digest, reference = weights_hash(model.denoiser.state_dict()), self.reference
        against = (reference.detector.hash, reference.hash, reference.statistics.count)
        return [(digest, kind, wanted.t, sampling, self.first_seed, images, *against) for kind in kinds]

    def measure(self, wanted: _Wanted, model: Model, subject: Subject, stop: StopRequest) -> list[Score]:
        """The scores of one pass."""
        batch = sampling_batch(model)
        if wanted.t is not None:
            owner = model_subject(model, subject.name, None, self.first_seed, step=subject.step)
            denoise, times, seen = model_denoise(model), [wanted.t], seen_by(self.dataset, model.card.latents)
            return denoising_distances(denoise, seen, times, self.reference, owner, subject.count, batch)
        sampling = Sampling(steps=wanted.steps)
        owner = model_subject(model, subject.name, sampling, self.first_seed, step=subject.step)
        seeds = range(self.first_seed, self.first_seed + subject.count)
        return evaluate(
            until_stopped(stop, generate(model, seeds, sampling, batch)), self.reference, owner, self.metrics
        )


def subjects_of(study: Study, variant: Variant, run: Path) -> list[Subject]:
    """What is measured of a variant whose stages are trained: its model, then the curves' checkpoints.

    The curve of its own stage comes first: variants that have all stages in common then begin with different ones, and
    need not wait for each other.
    """
    folders = stage_folders(variant.recipe, run)
    points = [
        Subject(stage, step, study.measure.curve_count)
        for stage in sorted(variant.curves(study), key=lambda stage: stage != variant.stage)
        for step in kept_checkpoints(folders[stage] / "state")
    ]
    return [Subject(variant.stage, None, study.measure.count), *points]


def measure_variant(
    study: Study, variant: Variant, run: Path, send: Send, stop: StopRequest, device: str = "cpu"
) -> bool:
    """A worker's job: append the scores that a variant's scores.jsonl lacks; false if it was asked to stop.

    A training seed s is measured with the sampling seeds from s × count on: variants of one seed share their noise, and
    what the seeds differ by includes the chance of sampling. Each model is measured once: its scores are also noted in
    its stage's folder, for other variants and for other studies that share the stage.
    """
    folders, subjects = stage_folders(variant.recipe, run), subjects_of(study, variant, run)
    progress = SentProgress(send, f"{run.parent.name}/{run.name}: measuring", len(subjects))
    progress.begin(0)
    try:
        detectors = {_detector(study, subject) for subject in subjects}
        benches = {detector: _bench(study, variant, detector, device, progress, stop) for detector in detectors}
        for number, subject in enumerate(subjects, 1):
            stage = folders[subject.stage]
            with locked(stage / LOCK_FILE, "measures the same model", progress.say, stop):
                model = load_subject(variant.recipe, folders, subject).to(device)
                bench = benches[_detector(study, subject)]
                for wanted in _wanted(study, model.sampler, model.card.t_max):
                    if stop:
                        raise Stopped
                    append_scores(run / SCORES_FILE, _lacking(bench, wanted, model, subject, run, stage, stop))
            progress.at(number)
    except Stopped:
        return False
    (run / MEASURED_FILE).write_text(f"{len(_scores(run))}\n")
    return True


def load_subject(recipe: Recipe, folders: Mapping[str, Path], subject: Subject) -> Model:
    """A subject's model, with the sampler and the companion of its variant's recipe: others may share the stage."""
    folder = folders[subject.stage]
    if subject.step is None:
        model = Model.load(folder / "model").alone
    else:
        card = read_card(folder / "model" / CONFIG_FILE)
        model = averaged_model(kept_checkpoints(folder / "state")[subject.step], card)
    sampler = recipe.network.sampled_by(recipe.stages[subject.stage].sampler(recipe.second_time))
    model = Model(model.denoiser, model.card.model_copy(update={"sampler": sampler}))
    companion = companion_source(recipe, subject.stage)
    return (
        model if companion is None else model.joined(sources_before(recipe, subject.stage, folders).model(*companion))
    )


def sampling_steps(study: Study, sampler: Sampler) -> tuple[int, ...]:
    """The study's steps for a model that generates at once; a diffusion model's usual ones."""
    return study.measure.steps if sampler.generates_at_once else sampler.usual_steps


def _detector(study: Study, subject: Subject) -> str:
    measure = study.measure
    return measure.detector if subject.step is None else measure.curve_detector or measure.detector


def _bench(
    study: Study, variant: Variant, detector: str, device: str, progress: SentProgress, stop: StopRequest
) -> _Bench:
    measure, data = study.measure, variant.recipe.data
    path = measure.data or data.path
    channels, expected = data.channels if path == data.path else None, condition_of(variant.recipe)
    dataset = open_dataset(path, channels=channels, expected=expected)

    def counter(batches: Batches, total: int | None, text: str) -> Iterator[Tensor]:
        progress.say(f"looking at {total:,} images of the data first")
        return until_stopped(stop, batches)

    with locked(data_folder() / f".{Path(detector).name}.lock", "looks at the data", progress.say, stop):
        reference = reference_of(
            dataset,
            path,
            load_detector(detector, device),
            needs_reference_features(measure.metrics),
            count=measure.reference_count,
            counter=counter,
        )
    return _Bench(dataset, reference, measure.metrics, variant.seed * measure.count)


def _wanted(study: Study, sampler: Sampler, t_max: float) -> list[_Wanted]:
    times = study.measure.dfid if sampler.generates_at_once else ()
    passes = [_Wanted(steps=steps) for steps in sampling_steps(study, sampler)]
    return passes + [_Wanted(t=t) for t in times if t <= t_max]


def _lacking(
    bench: _Bench, wanted: _Wanted, model: Model, subject: Subject, run: Path, stage: Path, stop: StopRequest
) -> list[Score]:
    """The scores of one pass that the run's file lacks: from the stage's file, or measured and added to it."""
    identities = bench.identities(wanted, model, subject.count)
    own = {(score.subject, _identity(score)) for score in _scores(run)}
    if all((subject.name, identity) in own for identity in identities):
        return []
    noted = {_identity(score): score for score in _scores(stage)}
    if all(identity in noted for identity in identities):
        return [replace(noted[identity], subject=subject.name, step=subject.step) for identity in identities]
    scores = bench.measure(wanted, model, subject, stop)
    append_scores(stage / SCORES_FILE, scores)
    return scores


def _identity(score: Score) -> tuple[object, ...]:
    against = (score.detector_hash, score.reference_hash, score.reference_count)
    return (score.subject_hash, score.kind, score.t, score.sampling, score.seed, score.count, *against)


def _scores(folder: Path) -> list[Score]:
    file = folder / SCORES_FILE
    scores = read_scores(file) if file.is_file() else []
    return [score for score in scores if not score.set_conditions]
