"""A run: the stages of a recipe in order, each into its folder; an interrupted one resumes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor

from tcm.data import BatchSource, Dataset, Stream, open_data
from tcm.foundation.devices import deterministic_kernels, memory_errors
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.foundation.progress import SentProgress, Show, heard_progress, progress_of_stages
from tcm.foundation.signals import Stopped, StopRequest, stop_requests
from tcm.foundation.threads import threads_restored, usable_counts
from tcm.foundation.workers import Job, Send, side_by_side
from tcm.recipes.decided import noted_decision, settled
from tcm.recipes.estimates import less_memory
from tcm.recipes.folders import stage_folders
from tcm.recipes.lineage import (
    condition_of,
    offset_of,
    roles_of,
    trained_roles,
    watched_times,
    watching_roles,
)
from tcm.recipes.resolve import noted_recipe
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Stage
from tcm.training.adapting import check_data, shape_of
from tcm.training.batches import batches_of
from tcm.training.checkpoint import Checkpoints, disk_errors
from tcm.training.data_provenance import check_same_data, notes_of_data
from tcm.training.deciding import decide
from tcm.training.health import warnings_at_start
from tcm.training.learner import Learner
from tcm.training.locking import only_one
from tcm.training.metrics import METRICS_FILE, MetricsFile, time_bins
from tcm.training.precision import products, store_in_bfloat16
from tcm.training.resuming import Resumption, adopt, note, noted_init, resumption
from tcm.training.sharding import shard
from tcm.training.stage_loop import StageLoop
from tcm.training.stage_models import (
    ROLES,
    card_of,
    check_init,
    check_init_is_used,
    check_run,
    companion_source,
    models_of_run,
    needed_stages,
    sources_before,
    stage_models,
    trained_for,
)
from tcm.training.starts import append_start, start_now
from tcm.training.trackers import Tracker, TrackerName, open_tracker
from tcm.training.trainer import Trainer
from tcm.weights import Model, ModelCard


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; nothing here changes what it computes, but for the model that it starts from."""

    init: str | None = None
    sharded: bool = False
    trackers: Sequence[TrackerName] = ()
    deterministic: bool = False


@dataclass(frozen=True)
class Run:
    """A recipe being carried out in a folder, by these processes."""

    recipe: Recipe
    folder: Path
    processes: Processes
    console: Console
    options: RunOptions = RunOptions()

    def train(self) -> None:
        """Carry out all stages; raises Stopped if a signal stopped the run before the end.

        Called again on the same folder it resumes, to the same weights; `docs/training.md` says how exactly.
        """
        patient, quiet = self.processes.count > 1, not self.processes.first
        with stop_requests(patient, quiet) as stop, only_one(self.folder, self.processes):
            plan = self._plan()
            self._adopt(plan.resumption)
            trained = models_of_run(self.recipe, plan.folders)
            with notes_of_data(
                plan.data, self.folder, chain(*trained.values()), self.processes.first, self.console
            ) as notes:
                for name, model in plan.models.items():
                    if not model.is_dir():
                        card = notes.on(self._decided_card(name, plan))
                        with progress_of_stages(self.console) as show:
                            finished = self._train_stage(name, plan, card, show, stop)
                        if not finished:
                            raise Stopped(stop.by)
                    notes.add(trained[name])
                    self.processes.wait()
                notes.finish(stop)

    def train_side_by_side(self, workers: int, also: Sequence[Job] = ()) -> None:
        """Carry out all stages in up to `workers` processes of one thread, and what is `also` to do after some of them.

        A stage begins when those whose models it needs are done; its weights do not depend on what runs alongside it.
        """
        self._check_workers(workers)
        with stop_requests(patient=False) as stop, only_one(self.folder, self.processes):
            plan = self._plan()
            self._adopt(plan.resumption)
            note(self.folder, self.recipe, plan.init)
            jobs = [*(self._job(name) for name, model in plan.models.items() if not model.is_dir()), *also]
            trained = models_of_run(self.recipe, plan.folders)
            with notes_of_data(plan.data, self.folder, chain(*trained.values()), True, self.console) as notes:
                with heard_progress(self.console) as hear:
                    done = side_by_side(jobs, workers, stop, hear)
                for name, model in plan.models.items():
                    if model.is_dir():
                        notes.add(trained[name])
                if len(done) < len(jobs):
                    raise Stopped(stop.by)
                notes.finish(stop)

    def train_only(self, name: str, show: Show, stop: StopRequest) -> bool:
        """Carry out one stage, if those that it needs are done; the caller sees to it that nobody else does."""
        plan = self._plan()
        trained = models_of_run(self.recipe, plan.folders)[name]
        with notes_of_data(plan.data, self.folder, trained, self.processes.first, self.console) as notes:
            if not plan.models[name].is_dir():
                card = notes.on(self._decided_card(name, plan))
                if not self._train_stage(name, plan, card, show, stop):
                    return False
            notes.add(trained)
            notes.finish(stop)
        return True

    def check(self, workers: int | None = None) -> "RunPlan":
        """What training would do; refuses what it would refuse, and writes nothing."""
        if workers is not None:
            self._check_workers(workers)
        if self.folder.exists() and not self.folder.is_dir():
            raise TcmError(f"{self.folder} cannot be used as a run's folder (it is a file); choose another --run")
        return self._plan()

    def _job(self, name: str) -> Job:
        work = partial(train_stage_alone, self.recipe, self.folder, self.options, name)
        return Job(name, work, needed_stages(self.recipe, name))

    def _plan(self) -> "RunPlan":
        """What the run is made of, checked before anything is trained."""
        with self.processes.agreeing():
            self._check_processes()
            resumed = self._resumption()
            init = noted_init(self.options.init, self.folder)
            folders = stage_folders(self.recipe, self.folder)
            check_init_is_used(self.recipe, self.options.init)
            check_init(self.recipe, _done(folders, resumed).keys(), init)
            spec, expected = self.recipe.data, condition_of(self.recipe)
            data = open_data(spec.path, channels=spec.channels, expected=expected)
            condition, shape = check_data(self.recipe, data), shape_of(self.recipe, data)
            batches = {
                name: batches_of(self.recipe, stage.batch, data, self.processes)
                for name, stage in self.recipe.stages.items()
            }
            recipe = settled(self.recipe, self.folder)
            cards = {name: card_of(recipe, name, shape, condition) for name in folders}
            plan = RunPlan(data, batches, cards, folders, init, resumed)
            check_run(recipe, cards, plan.done, init)
            if self.processes.first:
                check_same_data(data, spec.path, self.folder, plan.models.values(), resumed.moved, self.console)
            return plan

    def _resumption(self) -> Resumption:
        """What changes in a run that resumes; a recipe that was adapted to changed data differs because of these."""
        try:
            return resumption(self.recipe, self.folder)
        except TcmError:
            noted = noted_recipe(self.folder)
            if self.processes.first and noted.data == self.recipe.data:
                data = open_data(noted.data.path, channels=noted.data.channels, expected=condition_of(noted))
                models = [folder / "model" for folder in stage_folders(noted, self.folder).values()]
                check_same_data(data, noted.data.path, self.folder, models, None, self.console)
            raise

    def _adopt(self, resumed: Resumption) -> None:
        if resumed.said:
            text = f"resuming with changes: {'; '.join(resumed.said)}"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        with self.processes.agreeing():
            if self.processes.first:
                adopt(resumed, self.recipe, self.folder)

    def _decided_card(self, name: str, plan: "RunPlan") -> ModelCard:
        """Decide what the recipe leaves open about a stage that begins now; the card of its model to be."""
        planned = plan.cards[name]
        with self.processes.agreeing():
            if self.processes.first:
                decide(self.recipe, name, self.folder)
        return card_of(settled(self.recipe, self.folder), name, planned.image_shape, planned.condition)

    def _train_stage(self, name: str, plan: "RunPlan", card: ModelCard, show: Show, stop: StopRequest) -> bool:
        folder, recipe = plan.folders[name], settled(self.recipe, self.folder)
        sources = sources_before(self.recipe, name, plan.folders, plan.init)
        with self.processes.agreeing():
            models = stage_models(recipe, name, card, sources)
            if self.processes.first:
                note(self.folder, self.recipe, plan.init)
        stage = recipe.stages[name]
        images, count = (card.image_shape, card.condition), self.processes.count
        checkpoints = Checkpoints(folder / "state", stage.keep, self.processes, stage.checkpoint_every)
        with ExitStack() as opened:
            opened.enter_context(memory_errors(lambda: less_memory(recipe, name, count, images, self.options.sharded)))
            opened.enter_context(disk_errors(folder))
            opened.enter_context(products(stage.precision))
            opened.enter_context(threads_restored())
            opened.enter_context(deterministic_kernels(self.options.deterministic))
            trainer = self._trainer(recipe, name, models)
            metrics, trackers = opened.enter_context(self._records(folder))
            progress = show(folder.name, stage.steps)
            warnings: list[str] = []
            if self.processes.first and not any(checkpoints.folder.glob("step-*")):
                warnings = warnings_at_start(recipe, name, plan.data, card.sigma_data)
                if (decision := noted_decision(folder)) is not None:
                    progress.say(decision.reason)
                    warnings += [f"{name}: {decision.reason}"] if decision.doubtful else []
            finished = StageLoop(
                trainer,
                plan.batches[name],
                card,
                stage.start(recipe) is not None,
                folder,
                checkpoints,
                progress,
                metrics,
                trackers,
                self._thread_counts(stage),
                warnings,
                watched_times(recipe, name),
                [role.highest for role in watching_roles(recipe, name) if role.highest is not None],
            ).run(stop)
            if finished:
                steps = settled(self.recipe, self.folder).stages[name].steps
                for key in trained_roles(self.recipe, name):
                    self._save_model(trainer.learners[key], trained_for(steps, models[key].card), folder / ROLES / key)
                beside = companion_source(recipe, name) if self.processes.first else None
                companion = None if beside is None else sources.model(*beside)
                self._save_model(trainer.learner, trained_for(steps, card), folder / "model", companion)
        return finished

    @contextmanager
    def _records(self, folder: Path) -> Iterator[tuple[MetricsFile | None, list[Tracker]]]:
        """The files of a stage that the first process writes as it trains, and its trackers; the others have none."""
        with ExitStack() as opened:
            metrics, trackers = None, []
            with self.processes.agreeing():
                if self.processes.first:
                    (folder / "samples").mkdir(parents=True, exist_ok=True)
                    append_start(folder, start_now(self.processes.device, self.processes.count))
                    metrics = opened.enter_context(closing(MetricsFile(folder / METRICS_FILE)))
                    trackers = [
                        opened.enter_context(closing(open_tracker(tracker, folder)))
                        for tracker in self.options.trackers
                    ]
            yield metrics, trackers

    def _trainer(self, recipe: Recipe, name: str, models: dict[str, Model]) -> Trainer:
        """Move the models to the device; shard and compile them as the run's options say."""
        stage, roles = recipe.stages[name], roles_of(recipe, name)
        for key, model in models.items():
            model.to(self.processes.device).denoiser.learn(roles[key].trained)
            if roles[key].precision == "bf16":
                store_in_bfloat16(model.denoiser.network)
            if self.options.sharded:
                shard(model.denoiser)
            if stage.compile:
                model.denoiser.network.compile()
        return Trainer(
            stage,
            stage.build(recipe),
            {key: model.denoiser for key, model in models.items()},
            roles,
            self.processes,
            seed=(recipe.seed, name),
            bin_edges=time_bins(recipe.t_min, recipe.t_max),
            schedule_offset=offset_of(recipe, name),
        )

    def _save_model(self, learner: Learner, card: ModelCard, folder: Path, companion: Model | None = None) -> None:
        """Write a role's first average as its model, with its companion if it has one."""
        weights = {name: _whole(tensor) for name, tensor in learner.averages[0].state_dict().items()}
        if self.processes.first:
            with torch.device("meta"):
                model = Model.fresh(card)
            model.denoiser.load_state_dict(weights, assign=True)
            (model if companion is None else model.joined(companion)).save(folder)

    def _thread_counts(self, stage: Stage) -> list[int]:
        """The numbers of threads to choose from; code is compiled for one."""
        if self.recipe.threads != "auto":
            return [self.recipe.threads]
        return [torch.get_num_threads()] if stage.compile else usable_counts(self.processes)

    def _check_workers(self, workers: int) -> None:
        if self.recipe.threads not in (1, "auto"):
            raise TcmError(
                f"workers={workers} are processes of one thread each, but threads={self.recipe.threads}; leave one out"
            )
        if self.processes.count > 1 or self.processes.device.type != "cpu":
            raise TcmError(
                f"workers={workers} works only on the CPU and without torchrun; leave it out or use --device cpu"
            )

    def _check_processes(self) -> None:
        if self.options.sharded and not dist.is_initialized():
            raise TcmError("--shard needs several processes, but there is only one; start them with torchrun")
        for name, stage in self.recipe.stages.items():
            share = self.processes.count * stage.accumulation
            if stage.batch % share:
                below = stage.batch // share * share
                nearest = f"{below} or {below + share}" if below else f"{share}"
                raise TcmError(
                    f"{name}.batch={stage.batch} cannot be shared by {self.processes.count} processes with "
                    f"accumulation={stage.accumulation}; use {nearest}"
                )


@dataclass(frozen=True)
class RunPlan:
    """A run's data, and each stage's batches, the card of its model to be, and its folder."""

    data: Dataset | Stream
    batches: dict[str, BatchSource]
    cards: dict[str, ModelCard]
    folders: dict[str, Path]
    init: str | None
    resumption: Resumption

    @property
    def done(self) -> dict[str, Path]:
        """The models of the stages that are not trained any more."""
        return _done(self.folders, self.resumption)

    @property
    def models(self) -> dict[str, Path]:
        """Where each stage's model is, or will be."""
        return {name: folder / "model" for name, folder in self.folders.items()}


def _done(folders: Mapping[str, Path], resumed: Resumption) -> dict[str, Path]:
    models = {name: folder / "model" for name, folder in folders.items()}
    return {name: model for name, model in models.items() if model.is_dir() and name not in resumed.extended}


def train_stage_alone(
    recipe: Recipe, folder: Path, options: RunOptions, name: str, send: Send, stop: StopRequest
) -> bool:
    """A worker's job: one stage of a run whose lock is held by the process that started the worker."""
    run = Run(recipe, folder, Processes(torch.device("cpu")), Console(quiet=True), options)
    plan = run._plan()
    return run._train_stage(name, plan, run._decided_card(name, plan), partial(SentProgress, send), stop)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
