"""What a stage reports: a window of steps summed up, written to metrics.jsonl and to trackers."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import log
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tcm.data.files import atomic_write
from tcm.errors import TcmError


class TrackerName(StrEnum):
    """A service that shows metrics, besides metrics.jsonl."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


TIME_BINS = 10


def time_bins(t_min: float, t_max: float) -> Tensor:
    """Edges that divide [t_min, t_max] into bins of equal width in ln t."""
    return torch.linspace(log(t_min), log(t_max), TIME_BINS + 1, dtype=torch.float64).exp()


@dataclass
class Window:
    """The steps since the last line of metrics; their time does not count what is done while paused."""

    steps: int = 0
    images: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    largest_gradient: float = 0.0
    bin_sums: list[float] = field(default_factory=lambda: [0.0] * TIME_BINS)
    bin_counts: list[float] = field(default_factory=lambda: [0.0] * TIME_BINS)
    since: float = field(default_factory=lambda: time.perf_counter())

    def add(self, losses: dict[str, float], gradient_norm: float, bins: Sequence[float], images: int) -> None:
        """Take in one step; `bins` holds the sums of the loss by t, then the counts."""
        self.steps += 1
        self.images += images
        for name, value in (losses | {"gradient_norm": gradient_norm}).items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.largest_gradient = max(self.largest_gradient, gradient_norm)
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

    def summary(self) -> dict[str, Any]:
        """Means over the window."""
        seconds = time.perf_counter() - self.since
        means = {name: total / self.steps for name, total in self.sums.items()}
        by_time = [a / n if n else None for a, n in zip(self.bin_sums, self.bin_counts, strict=True)]
        return means | {
            "gradient_norm_max": self.largest_gradient,
            "images_per_second": self.images / seconds,
            "loss_by_t": by_time,
        }


class Tracker(Protocol):
    """Something that takes named numbers at a step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take them."""
        ...

    def close(self) -> None:
        """Write what is pending."""
        ...


class MetricsFile:
    """metrics.jsonl: a line per log interval, per sample grid and per event."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)

    def rewind(self, step: int, keep_events: bool) -> None:
        """Drop the lines after `step`, from where training goes on; events stay if they will not happen again."""
        lines = read_metrics(self._path)
        kept = [line for line in lines if line["step"] <= step or (keep_events and "event" in line)]
        with atomic_write(self._path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file.close()
        self._file = self._path.open("a", buffering=1)

    def write(self, values: dict[str, Any]) -> None:
        """Append a line."""
        self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class HostedRun:
    """Scalars for Weights & Biases or trackio, which share an interface."""

    def __init__(self, service: TrackerName, project: str, name: str) -> None:
        try:
            if service is TrackerName.WANDB:
                import wandb as client
            else:
                import trackio as client
        except ImportError as error:
            raise _missing(service) from error
        self._run = client.init(project=project, name=name)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(name: TrackerName, folder: Path) -> Tracker:
    """The tracker of a stage's folder runs/NAME/STAGE."""
    if name is TrackerName.TENSORBOARD:
        return TensorBoard(folder)
    return HostedRun(name, project=folder.parent.name, name=folder.name)


def _missing(package: str) -> TcmError:
    return TcmError(f"track={package} needs the package {package}; pip install 'truncated-consistency[track]'")
