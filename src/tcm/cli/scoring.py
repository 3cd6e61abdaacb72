"""The steps of `tcm eval` and `tcm times`: what is opened, measured and printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tcm.data import Dataset, Stream, open_data, open_dataset
from tcm.evaluation.evaluate import METRICS, Metric, evaluate
from tcm.evaluation.features import Detector
from tcm.evaluation.measurement import Subject
from tcm.evaluation.references import (
    Reference,
    dataset_batches,
    is_published,
    published_reference,
    reference_of,
    stream_reference,
)
from tcm.evaluation.scores import Comparison, Score
from tcm.evaluation.sharing import shared_hash
from tcm.foundation.counting import counter
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.method.conditions import ConditionKind
from tcm.networks import ImageShape
from tcm.recipes.resolve import noted_recipe
from tcm.weights.card import CONFIG_FILE

Opened = TypeVar("Opened")


def is_images(target: str) -> bool:
    """Whether a target is a set of images: an existing path that is not a model folder."""
    path = Path(target)
    return path.exists() and not (path / CONFIG_FILE).exists()


def chosen_metrics(texts: Sequence[str]) -> tuple[Metric, ...]:
    """The metrics of `fid,kid`, or of several such options."""
    chosen = [part.strip() for text in texts for part in text.split(",")]
    unknown = [part for part in chosen if part not in METRICS]
    if unknown:
        raise TcmError(f"metrics: {unknown[0]!r} is unknown; choose from {', '.join(METRICS)}")
    return tuple(metric for metric in METRICS if metric in chosen)


@dataclass(frozen=True)
class ReferenceData:
    """What to compare with: what --data names, or the data of a run."""

    path: str
    split: str
    channels: int | None = None
    run: Path | None = None

    @classmethod
    def of_run(cls, run: Path, split: str) -> Self:
        """The data that a run was trained on."""
        data = noted_recipe(run).data
        return cls(data.path, split, data.channels, run)

    @property
    def published(self) -> bool:
        """Whether these are only statistics."""
        return is_published(Path(self.path))

    def open(self, opener: Callable[..., Opened], expected: ConditionKind | None = None) -> Opened:
        """The images; that a run's data is gone is said as such."""
        try:
            return opener(self.path, split=self.split, channels=self.channels, expected=expected)
        except TcmError as error:
            if self.run is None:
                raise
            raise TcmError(
                f"{self.run} was trained on {self.path}, which cannot be opened ({error}); say with --data where it is"
            ) from error

    def dataset(self, expected: ConditionKind | None) -> Dataset:
        """The data set itself, for what needs more than statistics; its captions as the model's encoder reads them."""
        if self.published:
            raise TcmError(
                f"{self.path} holds only statistics, but --dfid, --data-conditions and --retrieval need images; give a "
                "data set"
            )
        return self.open(open_dataset, expected)

    def reference(
        self,
        shape: ImageShape,
        detector: Detector,
        keep: bool,
        batch: int,
        processes: Processes,
        count: int | None = None,
    ) -> Reference:
        """What images of this shape are compared with: published statistics, a data set, a stream, or `count` of it."""
        if self.published:
            if count is not None:
                raise TcmError(f"--reference-count={count}: {self.path} holds statistics, not images; leave it out")
            return published_reference(Path(self.path), detector)
        name = self.path if self.split == "train" else f"{self.path} ({self.split})"
        opened = self.open(open_data)
        if opened.shape != shape and opened.latents is None:
            raise TcmError(
                f"images of shape {list(shape)} cannot be compared with {name}, which has {list(opened.shape)}; "
                "give data of the same shape (`tcm data prepare`), or --resize a model's images"
            )
        if isinstance(opened, Stream):
            return stream_reference(opened, name, detector, keep, batch, processes, count, counter(processes))
        return reference_of(opened, name, detector, keep, batch, processes, count, counter(processes))


def all_images(target: str, count: int | None) -> Dataset:
    """The images to measure; `count` may only repeat how many there are."""
    dataset = open_dataset(target)
    if count is not None and count != dataset.count:
        raise TcmError(f"-n {count}: {target} holds {dataset.count} images, and all of them are measured; leave out -n")
    return dataset


def score_images(
    dataset: Dataset, name: str, reference: Reference, metrics: Sequence[Metric], batch: int, processes: Processes
) -> list[Score]:
    """Measure a set of images, with a progress bar."""
    own = dataset.count // processes.count
    images = counter(processes)(dataset_batches(dataset, batch, processes), own, "measuring")
    subject = Subject(name, shared_hash(processes, dataset))
    return evaluate(images, reference, subject, metrics, processes)


def print_json(scores: Sequence[Score] | Sequence[Comparison]) -> None:
    """Scores, or pairs of them, with all their conditions."""
    print(json.dumps([asdict(score) for score in scores], indent=2, ensure_ascii=False))


def print_scores(scores: Sequence[Score], file: Path) -> None:
    """A table of the scores, and the conditions that they share."""
    table = Table(title=f"{scores[0].subject} against {scores[0].reference}", title_justify="left")
    for name in ("metric", "value", "images", "sampling", "note"):
        table.add_column(name, overflow="fold", justify="right" if name in ("value", "images") else "left")
    for score in scores:
        table.add_row(score.label, _value(score), f"{score.count:,}", escape(score.way), escape(score.note or ""))
    console = Console()
    console.print(table)
    one = scores[0]
    known = "an unknown number of" if one.reference_count is None else f"{one.reference_count:,}"
    console.print(
        f"reference {one.reference_hash[:12]} ({known} images); detector {one.detector} {one.detector_hash[:12]} "
        f"({escape(one.preprocessing)}); {one.quantisation}; appended to {file}",
        highlight=False,
        soft_wrap=True,
    )


def _value(score: Score) -> str:
    return f"{score.value:.4g}" + ("" if score.deviation is None else f" ± {score.deviation:.2g}")


def print_comparison(pairs: Sequence[Comparison]) -> None:
    """Two models' scores side by side."""
    table = Table(title=f"{pairs[0].first.count:,} images against {pairs[0].first.reference}", title_justify="left")
    for name in ("metric", _column(pairs[0].first), _column(pairs[0].second), "difference"):
        table.add_column(name, overflow="fold", justify="left" if name == "metric" else "right")
    for pair in pairs:
        change = pair.second.value - pair.first.value
        table.add_row(pair.first.label, _value(pair.first), _value(pair.second), f"{change:+.4g}")
    Console().print(table)


def _column(score: Score) -> str:
    return escape(score.subject + (f" ({score.way})" if score.way else ""))


def edge_note(tried: Sequence[float], best: float, span: tuple[float, float]) -> str | None:
    """A note where the best time is the lowest or the highest that was tried: a better one may lie beyond.

    It may not where the model's range, `span`, ends there.

    >>> edge_note([0.5, 1, 2], 2, (0.002, 80))
    'the best time is the highest that was tried; try higher ones too: --grid 1.41,2,2.83,4'
    >>> edge_note([0.5, 1, 2], 1, (0.002, 80)), edge_note([1, 2], 1, (1, 80))
    (None, None)
    """
    if best not in (min(tried), max(tried)):
        return None
    towards, sign = ("low", -1) if best == min(tried) else ("high", 1)
    times = sorted(best * 2 ** (sign * power) for power in (-0.5, 0, 0.5, 1))
    within = [t for t in times if span[0] <= t < span[1]]
    if best in (within[0], within[-1]):
        return None
    grid = ",".join(f"{t:.3g}" for t in within)
    return f"the best time is the {towards}est that was tried; try {towards}er ones too: --grid {grid}"


def print_times(rows: Sequence[tuple[float, Score]], best: float) -> None:
    """The distance at each second time, with bars."""
    table = Table(title=f"two-step sampling, {rows[0][1].count:,} samples per time", title_justify="left")
    for name in ("second time", rows[0][1].metric):
        table.add_column(name, justify="right")
    table.add_column("")
    highest = max(score.value for _, score in rows)
    for t, score in rows:
        bar = "█" * max(1, round(30 * score.value / max(highest, 1e-12)))
        table.add_row(f"{t:.4g}", f"{score.value:.4g}", bar, style="bold green" if t == best else "")
    Console().print(table)
    if rows[0][1].note is not None:
        Console().print(f"note: {rows[0][1].note}", highlight=False)
