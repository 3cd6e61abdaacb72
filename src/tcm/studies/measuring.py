"""A variant's scores: of its final model and, where the study asks for curves, of each kept checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from tcm.data import open_dataset
from tcm.evaluation.bench import Bench, MeasuredModel, Pass
from tcm.evaluation.evaluate import needs_reference_features
from tcm.evaluation.features import check_known, load_detector
from tcm.evaluation.references import reference_of
from tcm.evaluation.scores import Score, already_measured, append_scores, read_scores
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
from tcm.studies.schema import Study, Variant
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
                for one in _passes(study, model, subject.count):
                    append_scores(run / SCORES_FILE, _lacking(bench, one, model, subject, run, stage, stop))
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
) -> Bench:
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
    return Bench(dataset, reference, measure.metrics, variant.seed * measure.count)


def _passes(study: Study, model: Model, count: int) -> list[Pass]:
    times = study.measure.dfid if model.sampler.generates_at_once else ()
    passes = [Pass(count, steps=steps) for steps in sampling_steps(study, model.sampler)]
    return passes + [Pass(count, t=t) for t in times if t <= model.card.t_max]


def _lacking(
    bench: Bench, one: Pass, model: Model, subject: Subject, run: Path, stage: Path, stop: StopRequest
) -> list[Score]:
    """The scores of one pass that the run's file lacks: from the stage's file, or measured and added to it."""
    measured = MeasuredModel(model, subject.name, subject.step)
    wanted = bench.expected(one, measured)
    own, noted = [score for score in _scores(run) if score.subject == subject.name], _scores(stage)
    if all(already_measured(score, own) for score in wanted):
        return []
    found = [score for score in (already_measured(each, noted) for each in wanted) if score is not None]
    if len(found) == len(wanted):
        return [replace(score, subject=subject.name, step=subject.step) for score in found]
    scores = bench.measure(one, measured, stop)
    append_scores(stage / SCORES_FILE, scores)
    return scores


def _scores(folder: Path) -> list[Score]:
    file = folder / SCORES_FILE
    return read_scores(file) if file.is_file() else []
