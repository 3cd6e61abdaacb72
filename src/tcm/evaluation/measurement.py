"""One measurement: what is measured, against what, from how many images; its scores carry all of it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import UTC, datetime

from tcm.evaluation.references import PAPERS_COUNT, Observed, Reference
from tcm.evaluation.scores import ConditionSource, Kind, Score
from tcm.foundation.errors import TcmWarning
from tcm.foundation.machine import versions
from tcm.method.gaussians import frechet_distance

QUANTISATION = "clamp(127.5 x + 128) truncated to uint8"


@dataclass(frozen=True)
class Subject:
    """What is measured: a model's samples (from the first seed on) or a set of images."""

    name: str
    hash: str
    step: int | None = None
    sampling: str | None = None
    seed: int | None = None
    conditions: ConditionSource | None = None


@dataclass(frozen=True)
class Measurement:
    """The conditions that all scores of one measurement share."""

    subject: Subject
    reference: Reference
    count: int

    def score(
        self,
        kind: Kind,
        metric: str,
        value: float,
        settings: str,
        deviation: float | None = None,
        note: str | None = None,
        t: float | None = None,
    ) -> Score:
        """A score under these conditions."""
        detector = self.reference.detector
        return Score(
            kind=kind,
            metric=metric,
            t=t,
            value=value,
            deviation=deviation,
            count=self.count,
            subject=self.subject.name,
            subject_hash=self.subject.hash,
            step=self.subject.step,
            sampling=self.subject.sampling,
            conditions=self.subject.conditions,
            seed=self.subject.seed,
            detector=detector.name,
            detector_hash=detector.hash,
            preprocessing=detector.preprocessing,
            quantisation=QUANTISATION,
            reference=self.reference.name,
            reference_hash=self.reference.hash,
            reference_count=self.reference.statistics.count,
            settings=settings,
            note=note,
            versions=versions(),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def distance(self, name: str, observed: Observed, t: float | None = None) -> Score:
        """The Fréchet distance, with a warning and a note where the images are few."""
        dimension = self.reference.detector.dimension
        note = None
        if self.count <= dimension:
            note = f"rank {self.count - 1} of {dimension}: far too high, use more images"
            warnings.warn(
                f"{self.count} images give a covariance of rank {self.count - 1} in {dimension} dimensions, and a "
                f"distance that is far too high; use more than {dimension} images",
                TcmWarning,
                stacklevel=2,
            )
        elif self.reference.detector.name == "inception" and self.count < PAPERS_COUNT:
            note = f"too high by a bias of about 1/N; papers use {PAPERS_COUNT:,} images"
        value = frechet_distance(observed.statistics, self.reference.statistics)
        return self.score("fid", name, value, "covariance over N - 1", note=note, t=t)
