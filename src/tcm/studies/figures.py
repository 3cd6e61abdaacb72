"""A study's figures: every seed of every variant, the course of training, denoising over t, gradient norms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tcm.report.figures import INK, MUTED, SERIES, Limits, plot
from tcm.report.records import StageRecord
from tcm.studies.analysis import Values, summarise
from tcm.studies.results import spikes_of

WIDE = 8.0
"""Where the largest value is this many times the smallest, the axis is logarithmic."""
MOST_IN_LEGEND = 5
COLOURS = (1, 3, 4, 2, 0)
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.6)))


@dataclass(frozen=True)
class Line:
    """A line of a figure: the values of several seeds at each x."""

    name: str
    points: Mapping[float, Sequence[float]]


def every_seed(values: Mapping[str, Values], reference: str, x_label: str) -> str:
    """A row for each variant: its seeds as dots, their mean and its interval; the reference's mean as a line."""
    names = list(values)

    def draw(axes: Axes) -> None:
        for row, name in enumerate(names):
            seeds = list(values[name].values())
            found = summarise(seeds)
            colour = SERIES[3] if name == reference else SERIES[1]
            if found is None:
                axes.text(0.02, row, "no values", transform=axes.get_yaxis_transform(), color=MUTED, va="center")
                continue
            if found.interval is not None:
                axes.plot(found.interval, [row, row], color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt")
            axes.plot(seeds, [row] * len(seeds), "o", color=colour, markersize=4.5, alpha=0.75, markeredgewidth=0)
            axes.plot([found.mean], [row], marker="|", color=INK, markersize=13, markeredgewidth=1.6)
            if name == reference:
                axes.axvline(found.mean, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
        if _spans_much([one for some in values.values() for one in some.values()]):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_yticks(range(len(names)), [fill(name, 26) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)

    return plot(draw, x_label, "", height=0.9 + 0.36 * max(len(names), 2))


def over_steps(lines: Sequence[Line], y_label: str) -> str:
    """Values over the steps of a stage."""

    def draw(axes: Axes) -> None:
        _draw_lines(axes, lines)
        axes.set_xlim(left=0)

    return plot(draw, "step of the stage", y_label, height=_height(lines))


def over_times(lines: Sequence[Line], y_label: str) -> str:
    """Values over the noise level t."""
    return plot(lambda axes: _draw_lines(axes, lines), "noise level t", y_label, log_x=True, height=_height(lines))


def gradient_norms(stages: Sequence[StageRecord], limits: Limits) -> str:
    """The largest gradient norm of each line of metrics, a thin line for each seed; its spikes are circled."""

    def draw(axes: Axes) -> None:
        for stage in stages:
            steps = [line["step"] for line in stage.numbers]
            largest = [line["gradient_norm_max"] for line in stage.numbers]
            axes.plot(steps, largest, color=SERIES[1], linewidth=0.8, alpha=0.7)
            circled = [(step, norm) for step, norm in zip(steps, largest, strict=True) if step in spikes_of(stage)]
            if circled:
                axes.plot(*zip(*circled, strict=True), "o", color=SERIES[3], markersize=6, fillstyle="none")
        if limits is not None:
            axes.set_yscale("log")
            axes.set_ylim(limits)

    return plot(draw, "step of the stage", "gradient norm")


def _spans_much(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows more."""
    found = [one for one in values if np.isfinite(one)]
    return bool(found) and 0 < min(found) * WIDE < max(found)


def _draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """The mean over seeds, with a band from the lowest to the highest."""
    for index, line in enumerate(lines):
        xs = sorted(line.points)
        columns = [[one for one in line.points[x] if np.isfinite(one)] or [np.nan] for x in xs]
        colour, dashes = SERIES[COLOURS[index % len(COLOURS)]], DASHES[index // len(COLOURS) % len(DASHES)]
        low, high = [min(some) for some in columns], [max(some) for some in columns]
        axes.fill_between(xs, low, high, color=colour, alpha=0.16, linewidth=0)
        means = [float(np.mean(some)) for some in columns]
        axes.plot(xs, means, color=colour, linestyle=dashes, marker="o", markersize=3.5, label=line.name)
    if _spans_much([one for line in lines for some in line.points.values() for one in some]):
        axes.set_yscale("log")
    if len(lines) > MOST_IN_LEGEND:
        axes.figure.legend(loc="outside lower center", ncols=3, handlelength=2.8)
    elif len(lines) > 1:
        axes.legend(loc="best")


def _height(lines: Sequence[Line]) -> float:
    """Room for a legend below the axes."""
    return 3.1 + (0.22 * -(-len(lines) // 3) if len(lines) > MOST_IN_LEGEND else 0)
