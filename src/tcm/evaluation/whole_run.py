"""All stages of a run, measured alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tcm.data import open_dataset
from tcm.evaluation.bench import Bench, MeasuredModel, Pass
from tcm.evaluation.features import load_detector
from tcm.evaluation.references import PAPERS_COUNT, reference_of
from tcm.evaluation.scores import already_measured, append_scores, read_scores
from tcm.foundation.progress import SentProgress
from tcm.foundation.signals import Stopped, StopRequest
from tcm.foundation.workers import Send
from tcm.recipes.folders import SCORES_FILE, stage_folders
from tcm.recipes.lineage import condition_of
from tcm.recipes.schema import Recipe
from tcm.weights import Model


@dataclass(frozen=True)
class MeasurementPlan:
    """How a run is measured: by which detector, from how many samples, and at which times its denoising.

    A diffusion model is sampled with Heun's method. A consistency model is sampled in one and two steps, and its
    denoising is measured at each of the times.
    """

    detector: str
    count: int
    times: Sequence[float]

    def passes(self, model: Model) -> list[Pass]:
        """What is measured of a model."""
        times = [t for t in self.times if t <= model.card.t_max] if model.sampler.generates_at_once else []
        sampled = [Pass(self.count, steps=steps) for steps in model.sampler.usual_steps]
        return sampled + [Pass(PAPERS_COUNT, t=t) for t in times]


def unmeasured_stages(recipe: Recipe, run: Path, plan: MeasurementPlan) -> list[str]:
    """The stages of a run that are still to be trained, or whose scores its scores.jsonl lacks."""
    bench = _bench(recipe, plan)
    return [
        name
        for name, folder in stage_folders(recipe, run).items()
        if not (folder / "model").is_dir() or _missing(bench, _model(folder, name), run, plan)
    ]


def measure_stage(recipe: Recipe, run: Path, name: str, plan: MeasurementPlan, send: Send, stop: StopRequest) -> bool:
    """A worker's job: score a finished stage of a run into its scores.jsonl; false if it was asked to stop.

    What the file holds already is not measured again.
    """
    folder = stage_folders(recipe, run)[name]
    measured, bench = _model(folder, name), _bench(recipe, plan)
    for one in _missing(bench, measured, run, plan):
        what = "samples" if one.t is None else f"denoising at t = {one.t:g}"
        SentProgress(send, folder.name).say(f"measuring its {what}")
        try:
            append_scores(run / SCORES_FILE, bench.measure(one, measured, stop))
        except Stopped:
            return False
    return True


def _model(folder: Path, name: str) -> MeasuredModel:
    return MeasuredModel(Model.load(folder / "model"), name)


def _bench(recipe: Recipe, plan: MeasurementPlan) -> Bench:
    data = recipe.data
    dataset = open_dataset(data.path, channels=data.channels, expected=condition_of(recipe))
    return Bench(dataset, reference_of(dataset, data.path, load_detector(plan.detector), batch=256))


def _missing(bench: Bench, measured: MeasuredModel, run: Path, plan: MeasurementPlan) -> list[Pass]:
    known = read_scores(run / SCORES_FILE) if (run / SCORES_FILE).is_file() else []
    return [
        one
        for one in plan.passes(measured.model)
        if not all(already_measured(score, known) for score in bench.expected(one, measured))
    ]
