"""A study being carried out: each stage that variants have in common is trained once, then each variant is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from filelock import FileLock
from rich.console import Console

from tcm.foundation.devices import choose_device, chosen_device
from tcm.foundation.errors import Diverged
from tcm.foundation.locks import acquire
from tcm.foundation.processes import Processes
from tcm.foundation.progress import ProgressMessage, SentProgress
from tcm.foundation.signals import StopRequest, stop_requests
from tcm.foundation.workers import Job, Send, side_by_side
from tcm.recipes.overrides import key_of
from tcm.recipes.resolve import noted_recipe
from tcm.studies.common_stages import SharedStage, as_noted, shared_stages, stage_key, stages_to_train
from tcm.studies.folders import (
    MEASURING,
    Failure,
    is_measured,
    note_failure,
    noted_failure,
    prepare,
    run_folder,
    stage_folder,
)
from tcm.studies.measuring import check_measure
from tcm.studies.progress import FromJob, Ledger, StudyProgress, Task, shown
from tcm.studies.resolve import variants_of
from tcm.studies.schema import Study, Variant
from tcm.training.adapting import adapted
from tcm.training.data_provenance import is_noted
from tcm.training.run import Run

MeasureVariant = Callable[[Study, Variant, Path, Send, StopRequest, str], bool]
"""Measures a variant whose stages are trained, in its folder and on a device; false if it was asked to stop."""


@dataclass(frozen=True)
class Part:
    """The `index`-th of `count` shares of a study's variants, for several machines; the first is 1."""

    index: int = 1
    count: int = 1

    def of(self, variants: Sequence[Variant]) -> list[Variant]:
        """Every `count`-th of the variants, in their order.

        They are counted variant by variant, each with all its seeds, so that parts seldom need the same stages.
        """
        names = list(dict.fromkeys(variant.name for variant in variants))
        counted = sorted(range(len(variants)), key=lambda index: names.index(variants[index].name))
        return [variants[index] for index in sorted(counted[self.index - 1 :: self.count])]


@dataclass(frozen=True)
class Outcome:
    """How a study ended: the signal that stopped it before all was done, and the failures by the variants' folders."""

    stopped_by: str | None
    failures: Mapping[Path, Failure]

    @property
    def finished(self) -> bool:
        """Whether all that could be done is done."""
        return self.stopped_by is None


@dataclass(frozen=True)
class _Work:
    """A job of the study, and the variants that need it."""

    job: Job
    stage: str
    """Which it trains, or "measuring"."""
    variants: list[Variant]


def run_study(
    study: Study,
    out: Path,
    measure: MeasureVariant,
    console: Console,
    workers: int = 1,
    part: Part | None = None,
    device: str = "cpu",
) -> Outcome:
    """Train and measure all variants with all seeds, or a part of them; run it again to resume.

    `device` is a kind of device: worker k takes the k-th accelerator, or one thread of the CPU. One worker alone takes
    all threads.
    """
    everything = all_variants(study)
    check_measure(study, everything[0].recipe)
    stages = shared_stages(study, everything)
    prepare(study, everything, stages.values(), out)
    variants = everything if part is None else part.of(everything)
    jobs = _Jobs(study, out, stages, measure, device)
    works = jobs.left(variants)
    for variant in variants:
        note_failure(run_folder(out, variant), None)
    tasks = [Task(work.job.name, work.stage, frozenset(map(_label, work.variants))) for work in works]
    ledger = Ledger(tasks, [_label(variant) for variant in variants], workers)
    begin = partial(choose_device, device) if workers > 1 or device != "cpu" else _all_threads
    with stop_requests(patient=False) as stop, shown(console, ledger) as view:
        failed = partial(_failed, {work.job.name: work for work in works}, out, view)
        done = side_by_side([work.job for work in works], workers, stop, view.hear, begin, failed)
    runs = [run_folder(out, variant) for variant in variants]
    failures = {run: failure for run in runs if (failure := noted_failure(run)) is not None}
    return Outcome(None if len(done) == len(works) else stop.by, failures)


def all_variants(study: Study) -> list[Variant]:
    """All variants with the first seed, then with the second, and so on; their recipes adapted to the data."""
    first = [_adapted(study, variant) for variant in variants_of(study, study.seeds[0])]
    return [
        replace(variant, recipe=variant.recipe.model_copy(update={"seed": seed}))
        for seed in study.seeds
        for variant in first
    ]


def _adapted(study: Study, variant: Variant) -> Variant:
    overrides = [*study.overrides, *study.variants[variant.name].overrides]
    return replace(variant, recipe=adapted(variant.recipe, {key_of(override) for override in overrides}))


@dataclass(frozen=True)
class _Jobs:
    """Makes the jobs of a study; `stages` are those of all its parts, so that each part trains them alike."""

    study: Study
    out: Path
    stages: Mapping[str, SharedStage]
    measure: MeasureVariant
    device: str

    def left(self, variants: Sequence[Variant]) -> list[_Work]:
        """The jobs that are left to do for the variants, those of the first seed first."""
        users: dict[str, list[Variant]] = {}
        measuring = []
        for variant in variants:
            model = stage_folder(self.out, stage_key(variant.recipe, variant.stage)) / "model"
            if not (model.is_dir() and is_measured(run_folder(self.out, variant))):
                keys = [stage_key(variant.recipe, name) for name in stages_to_train(self.study, variant)]
                for key in keys:
                    users.setdefault(key, []).append(variant)
                measuring.append(self._measuring(variant, keys))
        training = [self._training(self.stages[key], users[key]) for key in users if not self._is_done(key)]
        order = [_label(variant) for variant in variants]
        return sorted([*training, *measuring], key=lambda work: order.index(_label(work.variants[0])))

    def _is_done(self, key: str) -> bool:
        return is_noted(stage_folder(self.out, key) / "model")

    def _measuring(self, variant: Variant, keys: Sequence[str]) -> _Work:
        name, run = f"{_label(variant)}, {MEASURING}", run_folder(self.out, variant)
        work = partial(_measure, name, self.measure, self.study, variant, run, self.device)
        return _Work(Job(name, work, frozenset(_job_name(self.stages[key]) for key in keys)), MEASURING, [variant])

    def _training(self, stage: SharedStage, users: list[Variant]) -> _Work:
        name = _job_name(stage)
        work = partial(_train, name, stage, stage_folder(self.out, stage.key), self.device)
        return _Work(Job(name, work, frozenset(_job_name(self.stages[key]) for key in stage.needs)), stage.name, users)


def _job_name(stage: SharedStage) -> str:
    return f"seed-{stage.recipe.seed}/{stage.key}"


def _label(variant: Variant) -> str:
    return f"seed-{variant.seed}/{variant.slug}"


def _all_threads(worker: int) -> None:
    """Leave the number of threads as it is."""


def _train(job: str, stage: SharedStage, folder: Path, device: str, send: Send, stop: StopRequest) -> bool:
    """A worker's job: train a stage, or wait until another process has."""
    tell = _Tell(job, send)
    tell("begins")
    lock = FileLock(folder / ".lock")
    progress = SentProgress(tell, job)
    if not acquire(lock, stop, partial(progress.say, "waiting for another process to train this stage")):
        return False
    try:
        recipe = as_noted(stage.recipe, noted_recipe(folder))
        training = Run(recipe, folder, Processes(chosen_device(device)), Console(quiet=True))
        return _ended(tell, training.train_only(stage.name, partial(SentProgress, tell), stop))
    finally:
        lock.release()


def _measure(
    job: str,
    measure: MeasureVariant,
    study: Study,
    variant: Variant,
    run: Path,
    device: str,
    send: Send,
    stop: StopRequest,
) -> bool:
    """A worker's job: measure a variant whose stages are trained."""
    tell = _Tell(job, send)
    tell("begins")
    return _ended(tell, measure(study, variant, run, tell, stop, str(chosen_device(device))))


@dataclass(frozen=True)
class _Tell:
    """Sends a job's messages under its name."""

    job: str
    send: Send

    def __call__(self, message: Literal["begins", "ended"] | ProgressMessage) -> None:
        self.send(FromJob(self.job, message))


def _ended(tell: _Tell, finished: bool) -> bool:
    if finished:
        tell("ended")
    return finished


def _failed(works: Mapping[str, _Work], out: Path, view: StudyProgress, job: Job, error: Exception) -> None:
    work = works[job.name]
    for variant in work.variants:
        failure = Failure(stage=work.stage, error=str(error), diverged=isinstance(error, Diverged))
        note_failure(run_folder(out, variant), failure)
    view.fail(job.name, str(error))
