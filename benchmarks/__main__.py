"""`python -m benchmarks [NAME …]`: run benchmarks, write benchmarks/results/NAME.json and docs/performance.md."""

import argparse
import os
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import (
    attention,
    compiling,
    dropout,
    exports,
    features,
    loader,
    optimizer,
    overhead,
    pieces,
    precision,
    roofline,
    rounding,
    sampling,
    scaling,
    stages,
    tangents,
    threads,
)
from benchmarks.harness import Row, Settings, number, save

BENCHMARKS: dict[str, tuple[str, Callable[[Settings], list[Row]]]] = {
    "stages": (stages.TITLE, stages.measure),
    "overhead": (overhead.TITLE, overhead.measure),
    "precision": (precision.TITLE, precision.measure),
    "rounding": (rounding.TITLE, rounding.measure),
    "tangents": (tangents.TITLE, tangents.measure),
    "tangent-steps": (tangents.STEPS_TITLE, tangents.measure_steps),
    "dropout": (dropout.TITLE, dropout.measure),
    "optimizer": (optimizer.TITLE, optimizer.measure),
    "roofline": (roofline.TITLE, roofline.measure),
    "pieces": (pieces.TITLE, pieces.measure),
    "attention": (attention.TITLE, attention.measure),
    "sampling": (sampling.TITLE, sampling.measure),
    "exports": (exports.TITLE, exports.measure),
    "scaling": (scaling.TITLE, scaling.measure),
    "threads": (threads.TITLE, threads.measure),
    "loader": (loader.TITLE, loader.measure),
    "features": (features.TITLE, features.measure),
    "compiling": (compiling.TITLE, compiling.measure),
}
BY_NAME_ONLY = ("compiling",)
"""The C++ compiler takes minutes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"some of {', '.join(BENCHMARKS)}; all but {', '.join(BY_NAME_ONLY)} by default",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds; nothing is written")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU seconds (with one thread): steady on a busy machine"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]}; choose from {', '.join(BENCHMARKS)}")
    settings = Settings(arguments.quick, arguments.cpu_time)
    if settings.cpu_time:
        torch.set_num_threads(1)
    console = Console(highlight=False)
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        console.print(f"[yellow]the machine is busy (load {os.getloadavg()[0]:.1f}): ratios alone mean something")
    for name in arguments.names or [name for name in BENCHMARKS if name not in BY_NAME_ONLY]:
        title, measure = BENCHMARKS[name]
        console.print(f"{name}: {title} …")
        started = time.perf_counter()
        rows = measure(settings)
        took = time.perf_counter() - started
        if not settings.quick:
            save(name, title, rows, settings, took)
        console.print(table(f"{name}, {torch.get_num_threads()} threads, {took:.0f} s", rows))


def table(title: str, rows: list[Row]) -> Table:
    out = Table(title=title, title_justify="left")
    for column in ("", "median", "lowest", "highest", "goal"):
        out.add_column(column, justify="left" if column in ("", "goal") else "right")
    for row in (row for row in rows if not row.detail):
        ends = ["" if end is None else number(end) for end in (row.low, row.high)]
        out.add_row(row.what, f"{number(row.value)} {row.unit}", *ends, row.goal)
    return out


if __name__ == "__main__":
    main()
