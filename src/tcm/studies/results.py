"""What a study's folder holds: each variant and seed, how far it has come, and its values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from tcm.evaluation.generation import Sampling
from tcm.evaluation.scores import Score
from tcm.recipes.folders import RECIPE_FILE
from tcm.report.records import RunRecord, StageRecord, read_run
from tcm.studies.analysis import Verdict, judge, spikes
from tcm.studies.folders import MEASURED_FILE, noted_failure, noted_study, run_folder
from tcm.studies.measuring import sampling_steps
from tcm.studies.resolve import variants_of
from tcm.studies.schema import GRADIENTS, Study, Variant
from tcm.weights import Model
from tcm.weights.model import CONFIG_FILE, read_card

Status = Literal["measured", "failed", "unfinished", "not begun"]
HIGHER_IS_BETTER = ("is", "precision", "recall")


@dataclass(frozen=True)
class Trial:
    """A variant with one seed; `values` are its model's, by the labels of the measurements.

    `courses` are the values over a stage's steps: by stage, then step, then label.
    """

    variant: Variant
    status: Status
    problem: str | None = None
    record: RunRecord | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    courses: Mapping[str, Mapping[int, Mapping[str, Score]]] = field(default_factory=dict)

    @property
    def stage(self) -> StageRecord | None:
        """The measured stage."""
        stages = [] if self.record is None else self.record.stages
        return next((stage for stage in stages if stage.name == self.variant.stage), None)

    @property
    def values(self) -> dict[str, float]:
        """The model's values by the measurements' labels, and the spikes of its gradient norm per 1,000 steps."""
        found = {label: score.value for label, score in self.scores.items()}
        stage = self.stage
        if stage is not None and stage.status == "finished" and stage.numbers:
            found[GRADIENTS] = 1000 * len(spikes_of(stage)) / stage.step
        return found


@dataclass(frozen=True)
class StudyResults:
    """All trials of a study, variant by variant and then seed by seed."""

    study: Study
    folder: Path
    trials: list[Trial]

    @property
    def labels(self) -> list[str]:
        """The measurements: those of the study, then others that there are values of."""
        wanted = self.study.measure.labels
        found = dict.fromkeys(label for trial in self.trials for label in trial.scores)
        return wanted + [label for label in found if label not in wanted]

    def of(self, variant: str) -> list[Trial]:
        """The trials of one variant."""
        return [trial for trial in self.trials if trial.variant.name == variant]

    def values(self, variant: str, label: str) -> dict[int, float]:
        """A variant's values of one measurement, by seed."""
        return {trial.variant.seed: trial.values[label] for trial in self.of(variant) if label in trial.values}

    def metric(self, label: str) -> str:
        """What a measurement is called, such as `digits distance, 1 step`."""
        kind, _, how = label.partition(", ")
        names = [trial.scores[label].metric for trial in self.trials if label in trial.scores]
        name = names[0] if names else kind
        return f"{name}, {how}" if how else f"{label} per 1,000 steps" if label == GRADIENTS else name

    @property
    def verdict(self) -> Verdict | None:
        """Whether the study's claim held; None if the study says nothing that could be checked."""
        expects = self.study.expects
        if expects is None:
            return None
        others = {name: self.values(name, expects.by) for name in expects.than}
        return judge(self.values(expects.better, expects.by), others, lower_is_better(expects.by))


def lower_is_better(label: str) -> bool:
    """Whether a lower value of a measurement is better, as it is for all distances.

    >>> lower_is_better("fid, 1 step"), lower_is_better("recall, 1 step")
    (True, False)
    """
    return label.partition(",")[0] not in HIGHER_IS_BETTER


def read_study(folder: Path) -> StudyResults:
    """Read the folder of a study: finished, in progress, or with variants that failed.

    >>> read_study(Path("runs/t-prime")).verdict.outcome  # doctest: +SKIP
    'held'
    """
    study = noted_study(folder)
    by_seed = [variants_of(study, seed) for seed in study.seeds]
    variants = [variant for same in zip(*by_seed, strict=True) for variant in same]
    return StudyResults(study, folder, [_trial(study, folder, variant) for variant in variants])


def spikes_of(stage: StageRecord) -> list[int]:
    """The steps at which a stage's gradient norm spiked."""
    found = spikes(
        [line["gradient_norm"] for line in stage.numbers], [line["gradient_norm_max"] for line in stage.numbers]
    )
    return [int(stage.numbers[index]["step"]) for index in found]


def _trial(study: Study, folder: Path, variant: Variant) -> Trial:
    run = run_folder(folder, variant)
    if not (run / RECIPE_FILE).is_file():
        return Trial(variant, *(_failure(run) or ("not begun", None)))
    record = read_run(run)
    variant = replace(variant, recipe=record.recipe)
    status: Status = "measured" if (run / MEASURED_FILE).exists() else "unfinished"
    problem = record.scores_problem
    if (failure := _failure(run)) is not None:
        status, problem = failure
    samplings: dict[str, dict[str, int]] = {
        stage.name: _steps_by_sampling(study, stage) for stage in record.stages if stage.model.is_dir()
    }
    scores: dict[str, Score] = {}
    courses: dict[str, dict[int, dict[str, Score]]] = {}
    for score in (score for score in record.scores if not score.set_conditions):
        name, _, step = score.subject.partition("@")
        label = _label(score, samplings.get(name, {}))
        if label is not None and not step:
            scores[label] = score
        elif label is not None:
            courses.setdefault(name, {}).setdefault(int(step), {})[label] = score
    return Trial(variant, status, problem, record, scores, courses)


def _failure(run: Path) -> tuple[Status, str] | None:
    failure = noted_failure(run)
    if failure is None:
        return None
    # The page is about the study, not about where its folder is on this machine.
    out = run.parents[2]
    error = failure.error.replace(f"{out.absolute()}/", "").replace(f"{out}/", "")
    return "failed", f"{failure.stage}: {error}"


def _steps_by_sampling(study: Study, stage: StageRecord) -> dict[str, int]:
    """How the scores of a stage's model describe its sampling, and how many steps that is."""
    card = read_card(stage.model / CONFIG_FILE).model_copy(update={"sampler": stage.sampler})
    with torch.device("meta"):
        model = Model.fresh(card)
    return {Sampling(steps=steps).describe(model): steps for steps in sampling_steps(study, stage.sampler)}


def _label(score: Score, steps_by_sampling: Mapping[str, int]) -> str | None:
    """The measurement that a score is of; None if it is none of the study's."""
    if score.t is not None:
        return f"dfid, t = {score.t:g}"
    steps = steps_by_sampling.get(score.sampling or "")
    return None if steps is None else f"{score.kind}, {steps} step{'' if steps == 1 else 's'}"
