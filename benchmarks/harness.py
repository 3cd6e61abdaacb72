"""What all benchmarks share: interleaved timing, ratios with their spread, peak memory, JSON and Markdown."""

import json
import multiprocessing
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- begin: written by `make bench` -->", "<!-- end -->"


@dataclass(frozen=True)
class Settings:
    """`quick` takes small sizes and few rounds; `cpu_time` counts CPU seconds, for one thread on a busy machine."""

    quick: bool = False
    cpu_time: bool = False

    def rounds(self, number: int) -> int:
        return min(number, 2) if self.quick else number

    def now(self) -> float:
        return time.process_time() if self.cpu_time else time.perf_counter()


@dataclass(frozen=True)
class Row:
    """One measured figure: the median, and the lowest and highest of all rounds where there are several."""

    what: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    goal: str = ""
    detail: bool = False
    """Too much for a table: in the JSON alone."""


Times = dict[str, list[float]]


def interleave(settings: Settings, runs: dict[str, Callable[[], object]], rounds: int, warm: int = 1) -> Times:
    """Seconds of each run, ABBA…: whatever else slows the machine down meets all of them alike."""
    found: Times = {name: [] for name in runs}
    for turn in range(warm + settings.rounds(rounds)):
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            started = settings.now()
            run()
            if turn >= warm:
                found[name].append(settings.now() - started)
    return found


def seconds(what: str, values: list[float], goal: str = "") -> Row:
    return spread(what, values, "s", goal)


def ratio(what: str, above: list[float], below: list[float], goal: str = "") -> Row:
    """The median of the ratios within each round."""
    return spread(what, [a / b for a, b in zip(above, below, strict=True)], "×", goal)


def share(what: str, part: list[float], whole: list[float], goal: str = "") -> Row:
    """The median of the shares within each round."""
    return spread(what, [100 * a / b for a, b in zip(part, whole, strict=True)], "%", goal)


def spread(what: str, values: list[float], unit: str, goal: str = "") -> Row:
    return Row(what, statistics.median(values), unit, min(values), max(values), goal)


def in_fresh_process(run: Callable[..., float], *arguments: object) -> float:
    """The result of `run` in a new process, which holds nothing from before."""
    # With a fixed threshold, glibc gives every large tensor back when it is freed: what is held is what is needed.
    with (
        patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536"}),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        return pool.submit(run, *arguments).result()


def peak_bytes() -> int:
    """The most memory that this process has had resident (VmHWM: getrusage would count its parent's too)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def machine() -> str:
    """The machine in a line."""
    cpu, memory = platform.processor(), ""
    if Path("/proc/cpuinfo").exists():
        info = Path("/proc/cpuinfo").read_text()
        name, family, model = (
            re.search(rf"^{key}\s*: (.*)$", info, re.M) for key in ("model name", "cpu family", "model")
        )
        cpu = f"{name[1] if name else cpu} (family {family[1] if family else '?'}, model {model[1] if model else '?'})"
        cpu += ", " + ", ".join(flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if f" {flag} " in info)
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    return f"{cpu}, {os.cpu_count()} cores{memory}, torch {torch.__version__}, Python {platform.python_version()}"


def save(name: str, title: str, rows: list[Row], settings: Settings, took: float) -> None:
    """Write the rows as JSON, and all results so far into the page."""
    RESULTS.mkdir(exist_ok=True)
    found = {
        "title": title,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "settings": asdict(settings),
        "seconds": round(took),
        "rows": [asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    write_page()


def write_page() -> None:
    """Put the tables of all results between the page's markers."""
    results = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    rows = [(name, Row(**row)) for name, found in results.items() for row in found["rows"] if row["goal"]]
    goals = [replace(row, what=f"`{name}`: {row.what}") for name, row in rows]
    parts = [BEGIN, "### Everything with a target\n", "| | median | lowest to highest | goal |\n|---|---:|---:|---|"]
    parts[-1] += "".join("\n" + _line(row) for row in goals) + "\n"
    for name, found in results.items():
        parts.append(f"### `{name}`: {found['title']}\n\n{_conditions(found)}\n")
        parts.append("| | median | lowest to highest | goal |\n|---|---:|---:|---|")
        parts[-1] += "".join("\n" + _line(Row(**row)) for row in found["rows"] if not row["detail"]) + "\n"
    page = PAGE.read_text()
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(head + "\n".join([*parts, END]) + tail)


def _conditions(found: dict[str, Any]) -> str:
    clock = "CPU time" if found["settings"]["cpu_time"] else "wall-clock time"
    return f"{found['machine']}; {found['threads']} threads, {clock}, load {found['load']}; took {found['seconds']} s."


def _line(row: Row) -> str:
    between = "" if row.low is None or row.high is None else f"{number(row.low)} to {number(row.high)}"
    unit = f" {row.unit}" if row.unit else ""
    return f"| {row.what} | {number(row.value)}{unit} | {between} | {row.goal} |"


def number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
