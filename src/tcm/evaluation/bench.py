"""A model measured pass by pass: the scores that a pass gives are known before it, so that none is measured twice."""

from collections.abc import Sequence
from dataclasses import dataclass

from tcm.data import Dataset
from tcm.data.latents import seen_by
from tcm.evaluation.denoising import denoising_distances, expected_denoising, model_denoise
from tcm.evaluation.evaluate import Metric, evaluate, expected_scores, model_subject
from tcm.evaluation.generation import Sampling, generate, sampling_batch
from tcm.evaluation.measurement import Measurement, Subject
from tcm.evaluation.references import Reference, chosen_images
from tcm.evaluation.scores import Score
from tcm.foundation.signals import Stopped, StopRequest, until_stopped
from tcm.weights import Model


@dataclass(frozen=True)
class Pass:
    """One pass over `count` images: samples in so many steps, or the data denoised at t."""

    count: int
    steps: int | None = None
    t: float | None = None


@dataclass(frozen=True)
class MeasuredModel:
    """A model and what its scores call it; `step` is that of a checkpoint."""

    model: Model
    name: str
    step: int | None = None


@dataclass(frozen=True)
class Bench:
    """What the scores of several models have in common."""

    dataset: Dataset
    reference: Reference
    metrics: Sequence[Metric] = ("fid",)
    first_seed: int = 0

    def expected(self, one: Pass, measured: MeasuredModel) -> list[Score]:
        """The scores of a pass, still without their values."""
        subject = self._subject(one, measured)
        if one.t is None:
            return expected_scores(Measurement(subject, self.reference, one.count), self.metrics)
        images = len(chosen_images(self.dataset.count, one.count))
        return [expected_denoising(Measurement(subject, self.reference, images), one.t)]

    def measure(self, one: Pass, measured: MeasuredModel, stop: StopRequest) -> list[Score]:
        """The same scores with their values; raises Stopped if asked to stop."""
        if stop:
            raise Stopped
        model, subject = measured.model, self._subject(one, measured)
        batch = sampling_batch(model)
        if one.t is not None:
            denoise, seen = model_denoise(model), seen_by(self.dataset, model.card.latents)
            return denoising_distances(denoise, seen, [one.t], self.reference, subject, one.count, batch)
        seeds = range(self.first_seed, self.first_seed + one.count)
        images = generate(model, seeds, Sampling(steps=one.steps), batch)
        return evaluate(until_stopped(stop, images), self.reference, subject, self.metrics)

    def _subject(self, one: Pass, measured: MeasuredModel) -> Subject:
        sampling = Sampling(steps=one.steps) if one.t is None else None
        return model_subject(measured.model, measured.name, sampling, self.first_seed, step=measured.step)
