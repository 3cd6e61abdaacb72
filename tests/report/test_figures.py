"""The curves are well-formed SVG in the page's colours, whatever the numbers are."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tcm.report import figures
from tcm.report.drawing import observe_run
from tcm.report.headline import denoising_curves
from tcm.report.records import RunRecord, read_run
from tcm.training.starts import start_now


@pytest.fixture
def run(fair_run: Path) -> RunRecord:
    return read_run(fair_run)


def _check(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", svg)) <= {
        pair for one in ids for pair in ((one, ""), ("", one))
    }
    assert not re.search(r"#0000[01]\d", svg), "a stand-in for a colour is left"
    return root


def test_all_figures(run: RunRecord, fair_run: Path) -> None:
    colours = figures.series_of(run.stages)
    assert colours == {"diffusion": 0, "consistency": 1, "continued": 2, "truncated": 3}
    curves = denoising_curves(observe_run(run))
    consistency = run.stages[1:]
    svgs = [
        *(figures.loss_by_time(run.recipe, stage, colours[stage.name]) for stage in run.stages),
        figures.gradient_norms(consistency, colours, figures.gradient_limits(consistency)),
        figures.schedule("ratio", run.recipe, consistency, colours),
        figures.denoising(curves, colours, 1.0, "denoised digits distance"),
        figures.time_distributions(run.recipe, run.stages, colours, 1.0),
    ]
    for svg in svgs:
        _check(svg)
    assert "t′" in svgs[-1]
    assert "var(--series-3)" in svgs[-1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_strange_numbers(run: RunRecord, value: float) -> None:
    line = {"step": 1, "loss": value, "gradient_norm": value, "gradient_norm_max": value, "loss_by_t": [value] * 10}
    stage = replace(run.stages[1], lines=[line])
    _check(figures.loss_by_time(run.recipe, stage, 1))
    _check(figures.gradient_norms([stage], {"consistency": 1}, figures.gradient_limits([stage])))


def test_long_runs_are_thinned_and_keep_their_peaks(run: RunRecord) -> None:
    norms = np.ones(5000)
    norms[1234] = 77
    lines = [{"step": i, "loss": 1.0, "gradient_norm": 1.0, "gradient_norm_max": n} for i, n in enumerate(norms)]
    stage = replace(run.stages[1], lines=lines)
    thinned = figures._thinned(stage, "gradient_norm_max")
    assert len(thinned) == figures.MOST_POINTS
    assert thinned.max() == 77


def test_the_machine_is_named() -> None:
    assert "cores" in start_now(torch.device("cpu")).machine


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1.0, 0.5, 0.0], "log"), ([-1.0, 0.5, -0.2], "linear"), ([0.0, 0.0], "linear"), ([np.nan, 2.0], "log")],
)
def test_a_logarithmic_axis_hides_nothing(values: list[float], scale: str) -> None:
    axes = Figure().add_subplot()
    figures.log_scale(axes, np.array(values))
    assert axes.get_yscale() == scale
