"""Where a stage is trained: the machine and the versions, noted at each start."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from tcm.foundation.machine import describe_machine, versions
from tcm.training.metrics import read_metrics

STARTS_FILE = "starts.jsonl"


@dataclass(frozen=True)
class Start:
    """One start of a stage: when, on what, with which versions."""

    time: str
    machine: str
    processes: int
    versions: str


def start_now(device: torch.device, processes: int = 1) -> Start:
    """This process as a `Start`.

    >>> start_now(torch.device("cpu")).processes
    1
    """
    return Start(datetime.now(UTC).isoformat(timespec="seconds"), describe_machine(device), processes, versions())


def append_start(stage: Path, start: Start) -> None:
    """Append a line to starts.jsonl in the stage's folder."""
    with (stage / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start), ensure_ascii=False) + "\n")


def read_starts(stage: Path) -> list[Start]:
    """All starts of a stage, the first first; none if nothing was noted."""
    path = stage / STARTS_FILE
    return [Start(**line) for line in read_metrics(path)] if path.is_file() else []
