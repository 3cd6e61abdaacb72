"""The report's curves as inline SVG: text stays text, and every colour is one of the page's, so both themes fit."""

import re
from collections.abc import Callable, Sequence
from io import StringIO
from itertools import cycle
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tcm.recipes.schema import Recipe
from tcm.recipes.stages.flattening import Curves
from tcm.report.headline import DenoisingByTime
from tcm.report.records import StageRecord
from tcm.training.metrics import time_bins

# Stand-ins that no other drawing uses; `_svg` writes the page's variables in their place.
INK, MUTED, RULE = "#000001", "#000002", "#000003"
SERIES = ("#000010", "#000011", "#000012", "#000013", "#000014")
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule"} | {
    stand_in: f"--series-{index}" for index, stand_in in enumerate(SERIES)
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tcm",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
}
DOTTED = ((0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (5, 1.5, 1, 1.5, 1, 1.5)))
"""The lines of models that a stage trains besides the student."""
MOST_POINTS = 250
CHARACTERS_ACROSS, CHARACTERS_PER_INCH = 46, 11
"""How much of a label fits below an axis, and beside one: a longer label takes several lines."""
Limits = tuple[float, float] | None


def series_of(stages: Sequence[StageRecord]) -> dict[str, int]:
    """A colour for each stage: 0 if its model needs many steps, 1, 2 and 4 if one step suffices, 3 if truncated."""
    many_steps, one_step, truncated = [0], [1, 2, 4], [3, 4]
    chosen = {}
    for stage in stages:
        whole_range = one_step if stage.sampler.generates_at_once else many_steps
        colours = whole_range if stage.forgets_below is None else truncated
        chosen[stage.name] = colours.pop(0) if len(colours) > 1 else colours[0]
    return chosen


def loss_by_time(recipe: Recipe, stage: StageRecord, series: int) -> str:
    """The loss over t: at the stage's beginning (faint), in its middle, at its end."""
    edges = time_bins(recipe.t_min, recipe.t_max).numpy()
    centres = np.sqrt(edges[1:] * edges[:-1])
    lines = np.array([[np.nan if v is None else v for v in line["loss_by_t"]] for line in stage.numbers], float)
    parts = [part for part in np.array_split(lines, 3) if len(part)]
    names = ("first third", "second third", "last third")

    def draw(axes: Axes) -> None:
        for part, name, alpha in zip(parts, names, (0.3, 0.55, 1.0), strict=False):
            mean = np.nanmean(np.where(np.isfinite(part), part, np.nan)[:, _seen(part)], axis=0)
            axes.plot(
                centres[_seen(part)], mean, color=SERIES[series], alpha=alpha, marker="o", markersize=3, label=name
            )
        log_scale(axes, lines)
        axes.set_xlim(recipe.t_min, recipe.t_max)
        mark_t_prime(axes, stage.forgets_below)
        axes.legend(loc="best")

    return plot(draw, "noise level t", "weighted loss", log_x=True)


def _seen(part: np.ndarray) -> np.ndarray:
    """The bins in which there is any finite loss."""
    return np.isfinite(part).any(0)


def losses_over_steps(stages: Sequence[StageRecord], colours: dict[str, int]) -> str:
    """The loss of each stage over its steps, and that of each other model that it trains, dotted."""

    def draw(axes: Axes) -> None:
        found = []
        for stage in stages:
            look, dots = _line(colours[stage.name]), dict(zip(stage.other_roles, cycle(DOTTED), strict=False))
            for role, key in stage.losses.items():
                name = f"{stage.name}: {role}" if stage.other_roles else stage.name
                steps, loss = _thinned(stage, "step", key), _thinned(stage, key, key)
                axes.plot(steps, loss, **look | {"linestyle": dots.get(role, look["linestyle"])}, label=name)
                found.append(loss)
        log_scale(axes, np.concatenate(found))
        axes.legend(loc="best")

    return plot(draw, "step of the stage", "loss")


def gradient_norms(stages: Sequence[StageRecord], colours: dict[str, int], limits: Limits) -> str:
    """Mean and, as a band above it, largest gradient norm over steps."""

    def draw(axes: Axes) -> None:
        for stage in stages:
            step, norm, largest = (_thinned(stage, key) for key in ("step", "gradient_norm", "gradient_norm_max"))
            colour = SERIES[colours[stage.name]]
            axes.fill_between(step, norm, largest, color=colour, alpha=0.18, linewidth=0)
            axes.plot(step, norm, **_line(colours[stage.name]), label=stage.name)
        if limits is not None:
            axes.set_yscale("log")
            axes.set_ylim(limits)
        axes.legend(loc="best")

    return plot(draw, "step of the stage", "gradient norm")


def gradient_limits(stages: Sequence[StageRecord]) -> Limits:
    """One range for the gradient norms of all stages, so that figures side by side can be compared."""
    keys = ("gradient_norm", "gradient_norm_max")
    values = np.array([line[key] for stage in stages for line in stage.numbers for key in keys], float)
    values = values[np.isfinite(values) & (values > 0)]
    return (float(values.min()) / 1.2, float(values.max()) * 1.2) if len(values) else None


def schedule(name: str, recipe: Recipe, stages: Sequence[StageRecord], colours: dict[str, int]) -> str:
    """What the objectives schedule over the steps under this name; bold as far as the stage has come."""

    def draw(axes: Axes) -> None:
        for stage in stages:
            objective = stage.spec.build(recipe)
            if name not in objective.schedule(0):
                continue
            steps = np.unique(np.linspace(0, stage.spec.steps - 1, 1000).astype(int))
            values = np.array([objective.schedule(int(step))[name] for step in steps])
            colour = SERIES[colours[stage.name]]
            axes.step(steps, values, where="post", color=colour, alpha=0.35, linewidth=1)
            done = steps < stage.step
            axes.step(steps[done], values[done], where="post", **_line(colours[stage.name]), label=stage.name)
        axes.legend(loc="best")

    return plot(draw, "step of the stage", name)


def denoising(curves: Sequence[DenoisingByTime], colours: dict[str, int], t_prime: float | None, metric: str) -> str:
    """dFID_t over t for each consistency model, with t' marked."""

    def draw(axes: Axes) -> None:
        for curve in curves:
            line = _line(colours[curve.stage.name])
            axes.plot(curve.times, curve.values, **line, marker="o", markersize=4, label=curve.stage.name)
        log_scale(axes, np.array([value for curve in curves for value in curve.values]))
        mark_t_prime(axes, t_prime)
        axes.legend(loc="best")

    return plot(draw, "noise level t", metric, log_x=True)


def watched(curves: Curves, marked: Sequence[float], series: int) -> str:
    """The denoised distance over the steps of a stage, a line for each time; those of `marked` times are bold."""

    def draw(axes: Axes) -> None:
        for t, curve in sorted(curves.items()):
            steps, distances = zip(*curve, strict=True)
            bold = t in marked
            look: Any = {"linewidth": 2.4 if bold else 1.2, "alpha": 1.0 if bold else 0.55}
            axes.plot(steps, distances, color=SERIES[series], marker="o", markersize=3.5 if bold else 2.5, **look)
            name = f"t′ = {t:g}" if bold else f"t = {t:g}"
            end = steps[-1], distances[-1]
            axes.annotate(name, end, xytext=(6, 0), textcoords="offset points", va="center", annotation_clip=False)
        log_scale(axes, np.array([distance for curve in curves.values() for _, distance in curve]))

    return plot(draw, "step of the stage", "denoised distance")


def time_distributions(
    recipe: Recipe, stages: Sequence[StageRecord], colours: dict[str, int], t_prime: float | None
) -> str:
    """The density of ln t from which each stage draws its training times, at its last step."""

    def draw(axes: Axes) -> None:
        highest = 0.0
        for stage in stages:
            times = stage.spec.build(recipe).times
            if times is None:
                continue
            t = np.geomspace(*stage.span, 400)
            density = times.at(stage.spec.steps - 1).density(torch.from_numpy(t)).numpy() * t
            colour = SERIES[colours[stage.name]]
            axes.fill_between(t, density, color=colour, alpha=0.12, linewidth=0)
            axes.plot(t, density, **_line(colours[stage.name]), label=stage.name)
            # A peak at t' that dwarfs all else is cut, so that the rest stays visible.
            highest = max(highest, float(np.quantile(density, 1 if stage.forgets_below is None else 0.75)))
        axes.set_ylim(0, highest * 1.6)
        mark_t_prime(axes, t_prime)
        axes.legend(loc="upper left")

    return plot(draw, "noise level t", "density of ln t", log_x=True)


def log_scale(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic y axis, unless there is nothing that it can show, or something that it would hide.

    A method's loss may change its sign (SiD's hovers around zero).
    """
    if (values > 0).any() and not (values < 0).any():
        axes.set_yscale("log")


def _line(series: int) -> Any:
    """The look of a stage's line; a second consistency stage is dashed, so that what it hides can be seen."""
    return {"color": SERIES[series], "linestyle": (0, (4, 2)) if series == 2 else "-"}


def mark_t_prime(axes: Axes, t_prime: float | None) -> None:
    """A vertical line at t', if there is one."""
    if t_prime is not None:
        axes.axvline(t_prime, color=INK, linewidth=0.9, linestyle=(0, (2, 3)))
        axes.annotate(
            "t′", (t_prime, 1), xycoords=("data", "axes fraction"), xytext=(4, -2), textcoords="offset points", va="top"
        )


def _thinned(stage: StageRecord, key: str, having: str = "loss") -> np.ndarray:
    """A column of the lines that have a loss, in at most 250 points: means, but the largest of what is a maximum."""
    values = np.array([line[key] for line in stage.lines if having in line], float)
    parts = np.array_split(values, min(len(values), MOST_POINTS))
    return np.array([part.max() if key.endswith("_max") else part.mean() for part in parts])


def plot(draw: Callable[[Axes], None], x_label: str, y_label: str, log_x: bool = False, height: float = 3.1) -> str:
    """What `draw` draws, between labelled axes, as an <svg> element in the page's colours."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(fill(x_label, CHARACTERS_ACROSS))
        axes.set_ylabel(fill(y_label, int(CHARACTERS_PER_INCH * height)))
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        if log_x:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        draw(axes)
        for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
            if scale == "log":
                _plain_numbers(axis)
        return _svg(figure)


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis 0.1, 1, 10; where it spans little, 2 and 5 as well."""
    low, high = axis.get_view_interval()
    steps = (1.0,) if np.log10(high / low) > 2.5 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element whose colours are the page's variables."""
    file = StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height|version)="[^"]*"', "", opening).replace("<svg", '<svg aria-hidden="true"', 1)
    for stand_in, variable in VARIABLES.items():
        rest = rest.replace(stand_in, f"var({variable})")
    return f"{opening}>{rest}"
