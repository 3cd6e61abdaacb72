"""The loop of one stage: steps, metrics, samples, checkpoints, and what happens when something goes wrong."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tcm.data.grid import save_grid
from tcm.data.loader import Batches
from tcm.data.pixels import to_float, to_uint8
from tcm.devices import peak_memory
from tcm.errors import TcmError
from tcm.method.objectives import Consistency, TruncatedConsistency
from tcm.training.checkpoint import Checkpoints
from tcm.training.metrics import MetricsFile, Tracker, Window
from tcm.training.optimization import learning_rate
from tcm.training.progress import StageProgress
from tcm.training.signals import StopRequest
from tcm.training.trainer import StepRecord, Trainer
from tcm.weights import Model, ModelCard

SAMPLES = 64
COLLAPSE = 0.02
"""One-step samples that vary less than this fraction of the data's variation are a collapse."""


@dataclass
class Fit:
    """A stage being trained: `run` takes it from where its newest checkpoint stands to its last step."""

    trainer: Trainer
    batches: Batches
    card: ModelCard
    folder: Path
    checkpoints: Checkpoints
    progress: StageProgress
    trackers: list[Tracker]

    def run(self, stop: StopRequest) -> bool:
        """Train to the last step; false if a signal asked to stop before it, with all that is needed to go on saved."""
        stage = self.trainer.stage
        step = self._start()
        self.metrics = MetricsFile(self.folder / "metrics.jsonl", step) if self.trainer.processes.first else None
        batches, window = self.batches.starting_at(step), Window()
        while step < stage.steps:
            record = self.trainer.step(step, next(batches), bool(stop))
            step += 1
            self.progress.at(step)
            if record.verdict == "good":
                window.add(record.losses, record.gradient_norm, record.bins, stage.batch)
            else:
                self._event(step, "skipped", record.reason)
            if record.verdict == "go back":
                step = self._go_back(step, record)
                batches, window = self.batches.starting_at(step), Window()
                continue
            done = step == stage.steps
            if (step % stage.log_every == 0 or done) and window.steps:
                self._report(step, window)
                window = Window()
            if stage.sample_every and (step % stage.sample_every == 0 or done):
                self._sample(step)
            if step % stage.checkpoint_every == 0 or done or record.stop:
                self.checkpoints.save(self.trainer.tensors(), self.trainer.position(step))
            if record.stop and not done:
                return False
        if self.metrics is not None:
            self.metrics.close()
        return True

    def _start(self) -> int:
        """The step to begin with: the newest checkpoint's, or 0 with a checkpoint to go back to."""
        newest = self.checkpoints.newest()
        if newest is None:
            self.checkpoints.save(self.trainer.tensors(), self.trainer.position(0))
            return 0
        position = self.checkpoints.load(newest, self.trainer.tensors())
        self.trainer.restore(position)
        if position.step:
            self.progress.say(f"going on from step {position.step}")
        return position.step

    def _go_back(self, step: int, record: StepRecord) -> int:
        """Return to the newest checkpoint with other noise; after too many returns, say what to change."""
        guard, retry = self.trainer.stage.guard, self.trainer.retry + 1
        if retry > guard.retries:
            self._event(step, "failed", record.reason)
            raise TcmError(
                f"training does not recover: {record.reason}, {guard.patience} times in a row after {guard.retries} "
                f"returns to a checkpoint; lower learning_rate={self.trainer.stage.learning_rate:g}, set clip, or use "
                f"precision=bf16 or fp32"
            )
        newest = self.checkpoints.newest()
        if newest is None:
            raise TcmError(f"{self.checkpoints.folder} holds no whole checkpoint to go back to; start the stage anew")
        position = self.checkpoints.load(newest, self.trainer.tensors())
        self.trainer.restore(position)
        self.trainer.retry = retry
        self._event(position.step, "went back", f"to step {position.step} with other noise: {record.reason}")
        return position.step

    def _report(self, step: int, window: Window) -> None:
        trainer = self.trainer
        values = window.summary() | {
            "learning_rate": learning_rate(trainer.stage, step - 1),
            "skipped": trainer.guard.skipped,
            "memory": peak_memory(trainer.processes.device),
        }
        objective = trainer.objective
        if isinstance(objective, Consistency | TruncatedConsistency):
            values["ratio"] = objective.pairs.curriculum.ratio(step - 1)
        self.progress.report(step, values)
        self._write({"step": step} | values)
        for tracker in self.trackers:
            tracker.log(step, {name: value for name, value in values.items() if isinstance(value, int | float)})

    def _sample(self, step: int) -> None:
        """Write a grid of fixed seeds made with the averaged weights, and watch for collapse."""
        with self.trainer.averaged():
            images = Model(self.trainer.student, self.card).sample(SAMPLES)
        if not self.trainer.processes.first:
            return
        save_grid(self.folder / "samples" / f"step-{step:07d}.png", to_uint8(images))
        spread = float(images.std(0).mean())
        self._write({"step": step, "spread": spread})
        of_data = float(to_float(torch.as_tensor(self.batches.at(0).images)).std(0).mean())
        if self.card.kind != "diffusion" and spread < COLLAPSE * of_data:
            remedy = "raise boundary_weight or boundary_fraction" if self.card.kind == "truncated" else "train longer"
            self._event(step, "collapse", f"one-step samples hardly differ (spread {spread:.2g}); {remedy}")

    def _event(self, step: int, event: str, reason: str) -> None:
        self._write({"step": step, "event": event, "reason": reason})
        self.progress.say(f"step {step}: {event}: {reason}")

    def _write(self, values: dict[str, object]) -> None:
        if self.metrics is not None:
            self.metrics.write(values)
