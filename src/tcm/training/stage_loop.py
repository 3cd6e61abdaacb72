"""The loop of one stage: steps, metrics, samples, checkpoints, and what happens when something goes wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tcm.data.grid import save_grid
from tcm.data.loader import BatchSource, LoadedBatch, Resume
from tcm.data.pixels import to_float, to_uint8
from tcm.foundation.devices import peak_memory
from tcm.foundation.errors import Diverged, TcmError
from tcm.foundation.progress import StageProgress
from tcm.foundation.signals import StopRequest
from tcm.foundation.threads import Threads
from tcm.recipes.decided import note_decision
from tcm.recipes.stages.base import Decision
from tcm.recipes.stages.flattening import Curves, is_flat
from tcm.training.checkpoint import Checkpoints, Position
from tcm.training.health import COLLAPSE_EVENT, FEATURELESS_EVENT, WARNING, Variation, featurelessness
from tcm.training.metrics import MetricsFile, Window
from tcm.training.rounding import GOOD, measure_rounding, refuse_rounding
from tcm.training.trackers import Tracker
from tcm.training.trainer import StepRecord, Trainer
from tcm.training.watching import METRIC, DenoisingWatch, extended, watched_steps
from tcm.weights import Model, ModelCard

SAMPLES = 64
COLLAPSE = 0.02
"""One-step samples that vary less than this fraction of the data's variation, beyond what c_skip passes of the noise,
are a collapse."""


@dataclass(frozen=True)
class StageLoop:
    """A stage being trained: `run` takes it from where its newest checkpoint stands to its last step."""

    trainer: Trainer
    batches: BatchSource
    card: ModelCard
    generates: bool
    folder: Path
    checkpoints: Checkpoints
    progress: StageProgress
    metrics: MetricsFile | None
    trackers: list[Tracker]
    thread_counts: Sequence[int]
    """The numbers of threads to choose from."""
    warnings: Sequence[str] = ()
    """What is said and recorded when the stage begins."""
    times: Sequence[float] = ()
    """At which the model's denoising is watched."""
    dividing_times: Sequence[float] = ()
    """Those of them at which `until_flat` looks."""

    def run(self, stop: StopRequest) -> bool:
        """Train to the last step; false if a signal asked to stop before it, with all that resuming needs saved."""
        stage = self.trainer.stage
        position = self._start()
        step, batches, window, returns = position.step, self._batches_from(position), Window(), 0
        resume, threads = position.data, Threads(self.thread_counts, position.threads)
        watch = DenoisingWatch(self.trainer, self.batches, self.times) if self.times else None
        watched, curves = set(watched_steps(stage.steps)), position.curves
        done = self._done(step, curves)
        while not done:
            loaded = next(batches)
            if threads.due and not self.trainer.skipping:
                with window.paused():
                    if self._choose_threads(threads, step, loaded):
                        self._save(step, resume, curves, threads.count)
            threads.begin(trying=False)
            record = self.trainer.step(step, loaded, bool(stop))
            threads.end(stage.batch)
            step, resume = step + 1, loaded.resume
            self.progress.at(step)
            if record.verdict == "good":
                window.add(record.numbers, record.bins, stage.batch)
            else:
                self._event(step, "skipped", record.reason)
            if record.verdict == "go back":
                returns += 1
                position = self._go_back(step, record, returns)
                step, batches, window, curves = position.step, self._batches_from(position), Window(), position.curves
                resume = position.data
                continue
            if watch is not None and step in watched:
                with window.paused():
                    curves = self._measure(watch, step, curves)
            done = self._done(step, curves)
            if (step % stage.log_every == 0 or done) and window.steps:
                self._report(step, window)
                window = Window()
            if self._samples_at(step, done):
                with window.paused():
                    self._sample(step, loaded, done)
            if done or record.stop or self._checkpoint_at(step):
                with window.paused():
                    self._save(step, resume, curves, threads.count)
                returns = 0
            if record.stop and not done:
                self.progress.say(f"step {step}: {stop.by or 'a signal to another process'}: saved and stopped")
                return False
        if step < stage.steps:
            self._note_end(step)
        return True

    def _done(self, step: int, curves: Curves) -> bool:
        """At the last step, or where a stage that trains until it is flat is: a function of what a checkpoint holds."""
        stage = self.trainer.stage
        if step >= stage.steps or not stage.until_flat or step < stage.earliest_end():
            return step >= stage.steps
        own = [curves.get(t, ()) for t in self.dividing_times]
        return all(curve and curve[-1][0] == step and is_flat(curve) for curve in own)

    def _measure(self, watch: DenoisingWatch, step: int, curves: Curves) -> dict[float, list[tuple[int, float]]]:
        distances = watch.distances()
        self._write({"step": step, METRIC: distances})
        for tracker in self.trackers:
            tracker.log(step, {f"{METRIC} at {t:g}": distance for t, distance in distances.items()})
        return extended(curves, step, distances)

    def _note_end(self, step: int) -> None:
        """Note that the stage ended before its last step, and why."""
        where = " and ".join(f"{t:g}" for t in self.dividing_times)
        reason = (
            f"its denoising at t = {where} has flattened after {step:,} of at most {self.trainer.stage.steps:,} steps"
        )
        self.progress.say(f"step {step}: {reason}")
        if self.trainer.processes.first:
            note_decision(self.folder, Decision(values={"steps": step, "until_flat": False}, reason=reason))

    def _batches_from(self, position: Position) -> Iterator[LoadedBatch]:
        with self.trainer.processes.agreeing():
            return self.batches.starting_at(position.step, position.data)

    def _choose_threads(self, threads: Threads, step: int, loaded: LoadedBatch) -> bool:
        """Time the passes of a step with different numbers of threads; true if the best is another than before."""
        before = threads.known
        threads.settle(partial(self.trainer.rehearse, step, loaded), self.trainer.stage.batch)
        if threads.known == before:
            return False
        self.progress.say(f"step {step}: {threads.describe()}")
        return True

    def _save(self, step: int, resume: Resume | None, curves: Curves, threads: int | None = None) -> None:
        """Write a checkpoint; `resume` is this process's part of the position in a stream."""
        parts = [] if resume is None else self.trainer.processes.gather(resume)
        data = {key: value for part in parts for key, value in part.items()} or None
        position = self.trainer.position(step).model_copy(update={"data": data, "curves": curves, "threads": threads})
        self.checkpoints.save(self.trainer.tensors(), position)

    def _start(self) -> Position:
        """Where to begin: at the newest checkpoint, or at step 0 with a checkpoint to go back to."""
        newest = self.checkpoints.newest()
        position, recorded = Position(step=0), -1
        if newest.path is not None:
            position = self.checkpoints.load(newest.path, self.trainer.tensors())
            self.trainer.restore(position)
            recorded = position.step
        step = position.step
        if self.metrics is not None:
            self.metrics.rewind(recorded, keep_events=False)
        if newest.path is None:
            self._check_precision()
            for reason in self.warnings:
                self._event(0, WARNING, reason)
            self._save(0, None, {})
        for damage in newest.damage:
            self._event(step, "damaged", damage)
        if step or newest.damage:
            self.progress.say(f"resuming from step {step}")
        if self.trainer.stage.until_flat:
            where = " and ".join(f"{t:g}" for t in self.dividing_times)
            self.progress.say(f"at most {self.trainer.stage.steps:,} steps, until its denoising at t = {where} is flat")
        self.progress.begin(step)
        return position

    def _check_precision(self) -> None:
        """Measure and record what a precision other than fp32 does to this stage; refuse one that is too coarse."""
        stage, edges = self.trainer.stage, self.trainer.bin_edges
        if stage.precision == "fp32":
            return
        rounding = measure_rounding(self.trainer, self.batches)
        self._write(rounding.line())
        self.progress.say(rounding.describe(edges))
        if not stage.accept_rounding:
            with self.trainer.processes.agreeing():
                refuse_rounding(self.card.provenance.stage or "", rounding)
        if rounding.lowest < GOOD:
            self._event(0, "rounding", f"rounding to {stage.precision} is part of what this stage learns from")

    def _go_back(self, step: int, record: StepRecord, returns: int) -> Position:
        """Return to the newest checkpoint with other noise; after too many returns to it, say what to change."""
        trainer, guard = self.trainer, self.trainer.stage.guard
        found = self.checkpoints.newest()
        newest = found.path
        with trainer.processes.agreeing():
            if newest is None:
                raise TcmError(
                    f"{self.checkpoints.folder} has no whole checkpoint to go back to; start the stage again"
                )
            if returns > guard.retries:
                self._event(step, "failed", record.reason)
                raise Diverged(
                    f"training does not recover: {record.reason}, {guard.patience} times in a row, even after "
                    f"{guard.retries} returns to {newest}; {self._remedy()}"
                )
        position = self.checkpoints.load(newest, trainer.tensors())
        trainer.go_back(position)
        if self.metrics is not None:
            self.metrics.rewind(position.step, keep_events=True)
        for damage in found.damage:
            self._event(position.step, "damaged", damage)
        self._event(position.step, "went back", f"to step {position.step} with other noise: {record.reason}")
        self.progress.begin(position.step)
        return position

    def _remedy(self) -> str:
        stage = self.trainer.stage
        clip = "set clip" if stage.clip is None else f"lower clip={stage.clip:g}"
        precision = "" if stage.precision == "fp32" else f", or use a precision higher than {stage.precision}"
        return f"lower learning_rate={stage.learning_rate:g}, {clip}, or look at the data{precision}"

    def _checkpoint_at(self, step: int) -> bool:
        """At each interval, but not while updates are being skipped: a checkpoint to go back to is a good one."""
        return step % self.trainer.stage.checkpoint_every == 0 and not self.trainer.skipping

    def _report(self, step: int, window: Window) -> None:
        trainer = self.trainer
        summary, learners = window.summary(), trainer.learners.values()
        values = summary | {
            **{f"{learner.prefix}learning_rate": learner.learning_rate(step - 1) for learner in learners},
            "skipped": trainer.skipped,
            "memory": peak_memory(trainer.processes.device),
        }
        values |= trainer.objective.schedule(step - 1)
        self.progress.report(step, window.means(), summary["images_per_second"])
        self._write({"step": step} | values)
        for tracker in self.trackers:
            tracker.log(step, {name: value for name, value in values.items() if isinstance(value, int | float)})

    def _samples_at(self, step: int, done: bool) -> bool:
        """At each interval and at the end, if the model generates."""
        stage = self.trainer.stage
        if stage.sample_every == 0 or not self.generates:
            return False
        return step % stage.sample_every == 0 or done

    def _sample(self, step: int, loaded: LoadedBatch, done: bool) -> None:
        """Write a grid of fixed seeds made with the averaged weights, and watch their spread for collapse."""
        latents = self.card.latents
        with self.trainer.averaged():
            x = Model(self.trainer.student, self.card.model_copy(update={"latents": None})).sample(SAMPLES)
        if not self.trainer.processes.first:
            return
        images = x if latents is None else latents.decode(x.to(self.trainer.processes.device)).cpu()
        path = self.folder / "samples" / f"step-{step:07d}.png"
        save_grid(path, to_uint8(images), scale=max(1, 32 // images.shape[-2]))
        self.progress.say(f"step {step}: samples in {path}")
        found, of_data = Variation.of(x), Variation.of(to_float(loaded.images))
        self._write({"step": step, "spread": found.spread, "spread_of_data": of_data.spread})
        T = torch.tensor(self.card.t_max)
        of_noise = float(self.card.preconditioning.c_skip(T, self.card.sigma_data) * T)
        model = Model(self.trainer.student, self.card)
        if model.sampler.generates_at_once and found.spread < of_noise + COLLAPSE * of_data.spread:
            remedy = self.trainer.stage.collapse_remedy
            self._event(step, COLLAPSE_EVENT, f"one-step samples hardly differ (spread {found.spread:.2g}); {remedy}")
        elif done and (reason := featurelessness(found, of_data)) is not None:
            self._event(step, FEATURELESS_EVENT, reason)

    def _event(self, step: int, event: str, reason: str) -> None:
        self._write({"step": step, "event": event, "reason": reason})
        self.progress.say(f"step {step}: {event}: {reason}")

    def _write(self, values: dict[str, object]) -> None:
        if self.metrics is not None:
            self.metrics.write(values)
