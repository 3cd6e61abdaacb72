"""All stages of a run, measured alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tcm.data import Dataset, open_dataset
from tcm.data.latents import seen_by
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import evaluate, model_subject
from tcm.evaluation.features import load_detector, weights_hash
from tcm.evaluation.generation import Sampling, generate
from tcm.evaluation.references import Reference, reference_of
from tcm.evaluation.scores import Score, append_scores, read_scores
from tcm.foundation.progress import SentProgress
from tcm.foundation.signals import Stopped, StopRequest, until_stopped
from tcm.foundation.workers import Send
from tcm.recipes.folders import SCORES_FILE, stage_folders
from tcm.recipes.schema import Recipe
from tcm.weights import Model


@dataclass(frozen=True)
class MeasurementPlan:
    """How a run is measured: by which detector, from how many samples, and at which times its denoising."""

    detector: str
    count: int
    times: Sequence[float]
    batch: int = 256


def unmeasured_stages(recipe: Recipe, run: Path, plan: MeasurementPlan) -> list[str]:
    """The stages of a run that are still to be trained, or whose scores its scores.jsonl lacks."""
    known = _known_scores(run)
    models = {name: folder / "model" for name, folder in stage_folders(recipe, run).items()}
    return [name for name, path in models.items() if not path.is_dir() or _missing(Model.load(path), known, plan)]


def measure_stage(recipe: Recipe, run: Path, name: str, plan: MeasurementPlan, send: Send, stop: StopRequest) -> bool:
    """A worker's job: score a finished stage of a run into its scores.jsonl; false if it was asked to stop.

    A diffusion model is sampled with Heun's method. A consistency model is sampled in one and two steps, and its
    denoising is measured at each time of the plan. What the file holds already is not measured again.
    """
    folder = stage_folders(recipe, run)[name]
    model = Model.load(folder / "model")
    dataset = open_dataset(recipe.data.path, channels=recipe.data.channels, expected=model.card.condition)
    reference = reference_of(dataset, recipe.data.path, load_detector(plan.detector), batch=plan.batch)
    for what in _missing(model, _known_scores(run), plan):
        SentProgress(send, folder.name).say(f"measuring its {what}")
        try:
            if what == "samples":
                scores = _samples(model, name, reference, plan, stop)
            else:
                scores = _denoising(model, name, dataset, reference, plan)
        except Stopped:
            return False
        append_scores(run / SCORES_FILE, scores)
    return True


def _known_scores(run: Path) -> set[tuple[str, int | None]]:
    """The hash of each model that has scores, and of how many samples they are; None are those of its denoising."""
    file = run / SCORES_FILE
    scores = read_scores(file) if file.exists() else []
    return {(score.subject_hash, None if score.sampling is None else score.count) for score in scores}


def _missing(model: Model, known: set[tuple[str, int | None]], plan: MeasurementPlan) -> list[str]:
    digest = weights_hash(model.denoiser.state_dict())
    wanted = {"samples": plan.count} | ({"denoising": None} if model.sampler.generates_at_once else {})
    return [what for what, count in wanted.items() if (digest, count) not in known]


def _samples(model: Model, name: str, reference: Reference, plan: MeasurementPlan, stop: StopRequest) -> list[Score]:
    scores: list[Score] = []
    for steps in model.sampler.usual_steps:
        sampling = Sampling(steps=steps)
        images = until_stopped(stop, generate(model, range(plan.count), sampling, plan.batch))
        scores += evaluate(images, reference, model_subject(model, name, sampling, seed=0))
    return scores


def _denoising(model: Model, name: str, dataset: Dataset, reference: Reference, plan: MeasurementPlan) -> list[Score]:
    times = [t for t in plan.times if t <= model.card.t_max]
    subject = model_subject(model, name, None, seed=0)
    seen = seen_by(dataset, model.card.latents)
    return denoising_distances(model_denoise(model), seen, times, reference, subject, batch=plan.batch)
