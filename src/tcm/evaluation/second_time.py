"""The best time of the second of two sampling steps, found by measuring a grid of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tcm.evaluation.evaluate import evaluate_model
from tcm.evaluation.generation import Conditions, Sampling
from tcm.evaluation.references import Reference
from tcm.evaluation.scores import Score
from tcm.evaluation.sharing import ALONE
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write, write_text
from tcm.foundation.processes import Processes
from tcm.method.sampling import ConsistencySampler, check_times
from tcm.weights import Model
from tcm.weights.card import CONFIG_FILE

GRID_POINTS = 8


def time_grid(model: Model) -> list[float]:
    """Eight times, evenly spaced in ln t, from T/400 (or the start of the model's range) to T/8."""
    t_min, T = model.denoiser.t_min, model.denoiser.t_max
    low, high = max(t_min, T / 400), max(T / 8, 2 * t_min)
    return [low * (high / low) ** (i / (GRID_POINTS - 1)) for i in range(GRID_POINTS)]


def search_time(
    model: Model,
    name: str,
    seeds: Sequence[int],
    grid: Sequence[float],
    reference: Reference,
    batch: int = 64,
    processes: Processes = ALONE,
    condition: Conditions | None = None,
) -> Iterator[tuple[float, Score]]:
    """The distance of two-step samples, times (T, t), for each t of the grid: the same seeds throughout.

    >>> rows = search_time(model, "digits", range(2000), [0.5, 1, 2], reference)  # doctest: +SKIP
    >>> best, score = min(rows, key=lambda row: row[1].value)  # doctest: +SKIP
    """
    _sampler_of(model, name)
    for t in grid:
        check_times(model.denoiser, [model.card.t_max, t])
    for t in grid:
        sampling = Sampling(times=(model.card.t_max, t))
        (score,) = evaluate_model(model, name, seeds, sampling, reference, ("fid",), batch, processes, condition)
        yield t, score


def save_second_time(folder: Path, model: Model, t: float) -> None:
    """Write t into the folder's config.json as the time of the second step."""
    sampler = replace(_sampler_of(model, str(folder)), second_time=t)
    card = model.card.model_copy(update={"sampler": sampler})
    write_text(folder / CONFIG_FILE, card.model_dump_json(indent=2) + "\n")


def _sampler_of(model: Model, name: str) -> ConsistencySampler:
    """The sampler that has a second time."""
    if not isinstance(model.sampler, ConsistencySampler):
        raise TcmError(f"{name} is a {model.sampler.model} model, which has no second time; give a consistency model")
    return model.sampler


def save_plot(path: Path, rows: Sequence[tuple[float, Score]]) -> None:
    """The distance over the second time, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    times, values = [t for t, _ in rows], [score.value for _, score in rows]
    axes.semilogx(times, values, marker="o")
    best = min(range(len(rows)), key=values.__getitem__)
    axes.plot(times[best], values[best], "o", markersize=12, fillstyle="none", color="tab:red")
    axes.annotate(
        f"t = {times[best]:.3g}", (times[best], values[best]), xytext=(0, -18), textcoords="offset points", ha="center"
    )
    axes.set_xlabel("time of the second step")
    axes.set_ylabel(f"{rows[0][1].metric}, {rows[0][1].count:,} samples")
    axes.margins(y=0.2)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=150)
