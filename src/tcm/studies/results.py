"""What a study's folder holds: each variant and seed, how far it has come, and its values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Literal

import torch

from tcm.evaluation.generation import Sampling
from tcm.evaluation.scores import Score
from tcm.recipes.folders import RECIPE_FILE, stage_folders
from tcm.report.records import RunRecord, StageRecord, read_run
from tcm.studies.analysis import Column, Comparison, Verdict, compare, spikes
from tcm.studies.folders import Failure, is_measured, noted_failure, noted_study, run_folder
from tcm.studies.measuring import Subject, sampling_steps
from tcm.studies.resolve import variants_of
from tcm.studies.schema import GRADIENTS, Expects, Quantity, Study, Variant
from tcm.training.stage_models import companion_source, sources_before
from tcm.weights import Model
from tcm.weights.card import CONFIG_FILE, read_card

Status = Literal["measured", "failed", "unfinished", "not begun"]


@dataclass(frozen=True)
class Trial:
    """A variant with one seed, and the scores of its model.

    `courses` are the scores over a stage's steps: by stage, then step, then quantity.
    """

    variant: Variant
    status: Status
    problem: str | None = None
    diverged: bool = False
    record: RunRecord | None = None
    scores: Mapping[Quantity, Score] = field(default_factory=dict)
    courses: Mapping[str, Mapping[int, Mapping[Quantity, Score]]] = field(default_factory=dict)

    @property
    def stage(self) -> StageRecord | None:
        """The measured stage."""
        stages = [] if self.record is None else self.record.stages
        return next((stage for stage in stages if stage.name == self.variant.stage), None)

    @property
    def values(self) -> dict[Quantity, float]:
        """The values of the model's scores, and the spikes of its gradient norm per 1,000 steps; none if it failed."""
        if self.status == "failed":
            return {}
        found = {quantity: score.value for quantity, score in self.scores.items() if isfinite(score.value)}
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
    def quantities(self) -> list[Quantity]:
        """What was measured: as the study says, then others that there are values of."""
        wanted = self.study.measure.quantities
        found = dict.fromkeys(quantity for trial in self.trials for quantity in trial.scores)
        return wanted + [quantity for quantity in found if quantity not in wanted]

    def of(self, variant: str) -> list[Trial]:
        """The trials of one variant."""
        return [trial for trial in self.trials if trial.variant.name == variant]

    def values(self, variant: str, quantity: Quantity) -> dict[int, float]:
        """A variant's values of one quantity, by seed."""
        return {trial.variant.seed: trial.values[quantity] for trial in self.of(variant) if quantity in trial.values}

    def metric(self, quantity: Quantity) -> str:
        """What a quantity's metric is called, such as `digits distance`."""
        if quantity == GRADIENTS:
            return f"{quantity} per 1,000 steps"
        names = (trial.scores[quantity].metric for trial in self.trials if quantity in trial.scores)
        return next(names, quantity.kind)

    def title(self, quantity: Quantity) -> str:
        """Its metric and how it was measured, such as `digits distance, 1 step`."""
        return ", ".join(filter(None, [self.metric(quantity), quantity.how]))

    def column(self, variant: str, quantity: Quantity) -> Column:
        """A variant's values of one quantity, and the seeds with which it diverged."""
        diverged = {trial.variant.seed for trial in self.of(variant) if trial.diverged}
        return Column(self.values(variant, quantity), diverged)

    def comparisons(self, expected: Expects) -> list[Comparison]:
        """A part of the study's claim, against each of the variants that should be worse."""
        by = self.study.quantity(expected.by)
        better, lower = self.column(expected.better, by), by.lower_is_better
        return [compare(name, better, self.column(name, by), lower, expected.margin) for name in expected.than]

    @property
    def verdict(self) -> Verdict | None:
        """Whether the study's claim held; None if the study says nothing that could be checked."""
        found = [one for expected in self.study.expects for one in self.comparisons(expected)]
        return Verdict(tuple(found)) if found else None


def read_study(folder: Path) -> StudyResults:
    """Read the folder of a study: finished, in progress, or with variants that failed.

    >>> read_study(Path("runs/t-prime")).verdict.outcome  # doctest: +SKIP
    'held'
    """
    study = noted_study(folder)
    by_seed = [variants_of(study, seed, trust=False) for seed in study.seeds]
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
    failure = noted_failure(run)
    failed: tuple[Status, str | None, bool] | None = None
    if failure is not None:
        failed = "failed", _problem(run, failure), failure.diverged
    if not (run / RECIPE_FILE).is_file():
        return Trial(variant, *(failed or ("not begun",)))
    record = read_run(run)
    variant = replace(variant, recipe=record.recipe)
    status: Status = "measured" if is_measured(run) else "unfinished"
    problem = record.scores_problem
    if status == "measured" and not stage_folders(variant.recipe, run)[variant.stage].joinpath("model").is_dir():
        status, problem = "unfinished", "its model is not there any more; `tcm study run` trains it again"
    known = failed or (status, problem, False)
    scores: dict[Quantity, Score] = {}
    courses: dict[str, dict[int, dict[Quantity, Score]]] = {}
    for stage in record.stages:
        for score, quantity in _quantities(study, record, stage):
            if score.step is None:
                scores[quantity] = score
            else:
                courses.setdefault(stage.name, {}).setdefault(score.step, {})[quantity] = score
    return Trial(variant, *known, record, scores, courses)


def _problem(run: Path, failure: Failure) -> str:
    """Why a variant failed; the page is about the study, not about where its folder is on this machine."""
    out = run.parents[2]
    return f"{failure.stage}: {failure.error.replace(f'{out.absolute()}/', '').replace(f'{out}/', '')}"


def _steps_by_sampling(study: Study, record: RunRecord, stage: StageRecord) -> dict[str, int]:
    """How the scores of a stage's model describe its sampling, and how many steps that is."""
    folders = {other.name: other.folder for other in record.stages}
    companion = companion_source(record.recipe, stage.name) if stage.name in record.recipe.stages else None
    beside = None if companion is None else sources_before(record.recipe, stage.name, folders).card(*companion).alone
    card = read_card(stage.model / CONFIG_FILE).model_copy(update={"sampler": stage.sampler, "companion": beside})
    with torch.device("meta"):
        model = Model.fresh(card)
    return {Sampling(steps=steps).describe(model): steps for steps in sampling_steps(study, stage.sampler)}


def _quantities(study: Study, record: RunRecord, stage: StageRecord) -> Iterator[tuple[Score, Quantity]]:
    """The scores of a stage that are the study's, and what each is of."""
    steps_by_sampling = _steps_by_sampling(study, record, stage) if stage.model.is_dir() else {}
    for score in record.scores:
        if score.set_conditions or score.subject != Subject(stage.name, score.step, score.count).name:
            continue
        if score.t is not None:
            yield score, Quantity("dfid", t=score.t)
        elif score.sampling in steps_by_sampling:
            yield score, Quantity(score.kind, steps=steps_by_sampling[score.sampling])
