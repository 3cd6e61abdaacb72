"""Where a stage is trained: the machine and the versions, noted at each start."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

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


def describe_machine(device: torch.device) -> str:
    """One line such as `AMD EPYC, 2 cores, Linux x86_64, cpu with 1 thread`."""
    if device.type == "cpu":
        used = f"cpu with {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    else:
        used = f"{device.type} ({torch.get_device_module(device).get_device_name(device)})"
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, {used}"


def versions() -> str:
    """The versions that results depend on, in one line."""
    return f"tcm {version('truncated-consistency')}, torch {torch.__version__}, python {platform.python_version()}"


def _processor() -> str:
    """The processor's name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
