"""One measurement: what is measured, against what, from how many images; its scores carry all of it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from math import nan

from tcm.evaluation.references import PAPERS_COUNT, Observed, Reference
from tcm.evaluation.scores import ConditionSource, Kind, Score
from tcm.foundation.errors import TcmWarning
from tcm.foundation.machine import versions
from tcm.method.gaussians import frechet_distance

COVARIANCE = "covariance over N - 1"
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
        settings: str,
        value: float = nan,
        deviation: float | None = None,
        t: float | None = None,
    ) -> Score:
        """A score under these conditions; without a value one that is still to be measured."""
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
            note=self._note() if kind == "fid" else None,
            versions=versions(),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def distance(self, observed: Observed) -> float:
        """The Fréchet distance, with a warning where the images are too few."""
        dimension = self.reference.detector.dimension
        if self.count <= dimension:
            warnings.warn(
                f"{self.count} images give a covariance of rank {self.count - 1} in {dimension} dimensions, and a "
                f"distance that is far too high; use more than {dimension} images",
                TcmWarning,
                stacklevel=2,
            )
        return frechet_distance(observed.statistics, self.reference.statistics)

    def _note(self) -> str | None:
        """What few images do to a distance."""
        detector = self.reference.detector
        if self.count <= detector.dimension:
            return f"rank {self.count - 1} of {detector.dimension}: far too high, use more images"
        few = detector.name == "inception" and self.count < PAPERS_COUNT
        return f"too high by a bias of about 1/N; papers use {PAPERS_COUNT:,} images" if few else None
