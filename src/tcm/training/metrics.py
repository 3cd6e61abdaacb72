"""What a stage reports: a window of steps summed up, written to metrics.jsonl."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcm.foundation.files import read_record, write_text

TIME_BINS = 10


def time_bins(t_min: float, t_max: float) -> Tensor:
    """Edges that divide [t_min, t_max] into bins of equal width in ln t."""
    return torch.linspace(log(t_min), log(t_max), TIME_BINS + 1, dtype=torch.float64).exp()


@dataclass
class Window:
    """The steps since the last line of metrics; their time does not count what is done while paused."""

    steps: int = 0
    images: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)
    bin_sums: list[float] = field(default_factory=lambda: [0.0] * TIME_BINS)
    bin_counts: list[float] = field(default_factory=lambda: [0.0] * TIME_BINS)
    since: float = field(default_factory=lambda: time.perf_counter())

    def add(self, numbers: dict[str, float], bins: Sequence[float], images: int) -> None:
        """Take in one step's numbers, which need not be the same in every step: a role's come when it has its turn.

        `bins` holds the sums of the loss by t, then the counts.
        """
        self.steps += 1
        self.images += images
        for name, value in numbers.items():
            self.values.setdefault(name, []).append(value)
        self.bin_sums = [a + b for a, b in zip(self.bin_sums, bins[:TIME_BINS], strict=True)]
        self.bin_counts = [a + b for a, b in zip(self.bin_counts, bins[TIME_BINS:], strict=True)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the block runs, no time passes for the window."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - began

    def means(self) -> dict[str, float]:
        """Means over the window, each over the steps that have the number."""
        return {name: sum(values) / len(values) for name, values in self.values.items()}

    def summary(self) -> dict[str, Any]:
        """The means, the largest gradient norms, the speed and the loss by t."""
        seconds, means = time.perf_counter() - self.since, self.means()
        largest = {f"{name}_max": max(self.values[name]) for name in means if name.endswith("gradient_norm")}
        by_time = [a / n if n else None for a, n in zip(self.bin_sums, self.bin_counts, strict=True)]
        return {
            **means,
            **largest,
            "images_per_second": self.images / seconds,
            "loss_by_t": by_time,
        }


METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """metrics.jsonl: a line per log interval, per sample grid and per event."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def rewind(self, step: int, keep_events: bool) -> None:
        """Drop the lines after `step`, from where training resumes; events stay if they will not happen again."""
        lines = read_metrics(self._path)
        kept = [line for line in lines if line["step"] <= step or (keep_events and "event" in line)]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file.close()
        self._file = self._path.open("a", buffering=1, encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    lines = []
    for line in read_record(path).split("\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(found, dict):
            break
        lines.append(found)
    return lines
