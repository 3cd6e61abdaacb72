"""All stages of a run, measured alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tcm.data import Dataset, open_dataset
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import evaluate_model, model_subject
from tcm.evaluation.features import load_detector, weights_hash
from tcm.evaluation.references import Reference, reference_of
from tcm.evaluation.sampling import Sampling
from tcm.evaluation.scores import Score, append_scores, read_scores
from tcm.recipes.folders import RECIPE_FILE, SCORES_FILE, stage_folders
from tcm.recipes.resolve import resolve
from tcm.weights import Model


@dataclass(frozen=True)
class Plan:
    """How a run is measured: by which detector, from how many samples, and at which times its denoising."""

    detector: str
    count: int
    times: Sequence[float]
    batch: int = 256


def measure_run(run: Path, plan: Plan) -> Iterator[str]:
    """Score every finished stage of a run into its scores.jsonl; yields what is being measured.

    A diffusion model is sampled with Heun's method. A consistency model is sampled in one and two steps, and its
    denoising is measured at each time of the plan. What the file holds already is not measured again.
    """
    recipe = resolve(str(run / RECIPE_FILE))
    dataset = open_dataset(recipe.data.path, channels=recipe.data.channels)
    reference = reference_of(dataset, recipe.data.path, load_detector(plan.detector), batch=plan.batch)
    file = run / SCORES_FILE
    known = {(score.subject_hash, score.sampling is None) for score in read_scores(file)} if file.exists() else set()
    for name, folder in stage_folders(recipe, run).items():
        if not (folder / "model").is_dir():
            continue
        model = Model.load(folder / "model")
        digest = weights_hash(model.denoiser.state_dict())
        if (digest, False) not in known:
            yield f"{name}: samples"
            append_scores(file, _samples(model, name, reference, plan))
        if model.sampler.generates_at_once and (digest, True) not in known:
            yield f"{name}: denoising"
            append_scores(file, _denoising(model, name, dataset, reference, plan))


def _samples(model: Model, name: str, reference: Reference, plan: Plan) -> list[Score]:
    seeds = range(plan.count)
    return [
        score
        for n in model.sampler.usual_steps
        for score in evaluate_model(model, name, seeds, Sampling(steps=n), reference, batch=plan.batch)
    ]


def _denoising(model: Model, name: str, dataset: Dataset, reference: Reference, plan: Plan) -> list[Score]:
    times = [t for t in plan.times if t <= model.card.t_max]
    subject = model_subject(model, name, None, seed=0)
    return denoising_distances(model_denoise(model), dataset, times, reference, subject, batch=plan.batch)
