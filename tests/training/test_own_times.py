"""Times, a distance and a spacing from outside: iCT's grid, fixed or growing, its neighbours, a sum of absolutes."""

from dataclasses import dataclass, replace
from itertools import count
from math import erf, sqrt
from pathlib import Path
from typing import Literal, Self

import pytest
import torch
from inprocess import train
from launching import lines, tiny_recipe
from oracles import Exact, gaussian_consistency
from scipy.stats import norm
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.curriculum import Spacing
from tcm.method.distances import Distance
from tcm.method.objectives import Batch
from tcm.method.solvers import karras_times
from tcm.method.times import TimeDistribution
from tcm.recipes.resolve import resolve, to_toml
from tcm.report.curves import stability
from tcm.report.drawing import ObservedRun
from tcm.report.figures import time_distributions
from tcm.report.records import read_run


@dataclass(frozen=True)
class Grid(TimeDistribution):
    """P(t_i) ∝ erf((ln t_{i+1} − mean)/(√2 std)) − erf((ln t_i − mean)/(√2 std)) on a Karras grid: iCT."""

    points: int
    mean: float = -1.1
    std: float = 2.0
    bounds: tuple[float, float] = (0.002, 80.0)
    kind: Literal["test_own_times:Grid"] = "test_own_times:Grid"

    @property
    def span(self) -> tuple[float, float]:
        return self.bounds

    def within(self, low: float, high: float) -> Self:
        return replace(self, bounds=(low, high))

    @property
    def times(self) -> Tensor:
        return torch.tensor(karras_times(self.points, *self.bounds)[::-1], dtype=torch.float64)

    def masses(self) -> Tensor:
        marks = torch.tensor([erf((float(t.log()) - self.mean) / (sqrt(2) * self.std)) for t in self.times])
        return marks.diff().double() / float(marks[-1] - marks[0])

    def quantile(self, u: Tensor) -> Tensor:
        index = torch.searchsorted(self.masses().cumsum(0), u.double(), right=True)
        return self.times[1:][index.clamp(max=self.points - 2)]

    def density(self, t: Tensor) -> Tensor:
        index = torch.searchsorted(self.times, t.double()).clamp(1, self.points - 1) - 1
        return (self.masses() / self.times.diff())[index]


def intervals(step: int, first: int, last: int, every: int) -> int:
    """N(k) − 1 = min(s₀ 2^⌊k/K'⌋, s₁): iCT."""
    return min(first * 2 ** (step // every), last)


@dataclass(frozen=True)
class GrowingGrid(TimeDistribution):
    """A grid of N(k) times at step k."""

    every: int
    first: int = 10
    last: int = 1280
    bounds: tuple[float, float] = (0.002, 80.0)
    kind: Literal["test_own_times:GrowingGrid"] = "test_own_times:GrowingGrid"

    @property
    def span(self) -> tuple[float, float]:
        return self.bounds

    def within(self, low: float, high: float) -> Self:
        return replace(self, bounds=(low, high))

    def at(self, step: int) -> Grid:
        return Grid(intervals(step, self.first, self.last, self.every) + 1, bounds=self.bounds)

    def quantile(self, u: Tensor) -> Tensor:
        return self.at(0).quantile(u)

    def density(self, t: Tensor) -> Tensor:
        return self.at(0).density(t)


@dataclass(frozen=True)
class Neighbours(Spacing):
    """Δ_t is the distance to the next lower time of the grid of N(k)."""

    every: int
    first: int = 10
    last: int = 1280
    bounds: tuple[float, float] = (0.002, 80.0)
    kind: Literal["test_own_times:Neighbours"] = "test_own_times:Neighbours"

    def within(self, low: float, high: float) -> Self:
        return replace(self, bounds=(low, high))

    def delta(self, t: Tensor, step: int) -> Tensor:
        times = Grid(intervals(step, self.first, self.last, self.every) + 1, bounds=self.bounds).times
        return t - times[torch.searchsorted(times, t) - 1]

    @property
    def length(self) -> int:
        return next(step for step in count(0, self.every) if self.schedule(step)["points"] == self.last + 1)

    def schedule(self, step: int) -> dict[str, float]:
        return {"points": intervals(step, self.first, self.last, self.every) + 1}


@dataclass(frozen=True)
class SumOfAbsolutes(Distance):
    """Σ |x − y|."""

    kind: Literal["test_own_times:SumOfAbsolutes"] = "test_own_times:SumOfAbsolutes"

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).abs().flatten(1).sum(1)


WORDS = (
    "consistency.times={kind='test_own_times:Grid', points=12}",
    "consistency.distance={kind='test_own_times:SumOfAbsolutes'}",
)


def test_they_are_trained_and_reported(tmp_path: Path) -> None:
    recipe = tiny_recipe(4, *WORDS)
    stage = recipe.stages["consistency"]
    objective = stage.build(recipe)
    assert objective.times.span == (recipe.t_min, recipe.t_max)
    assert objective.times.quantile(torch.linspace(0, 1, 2000)).unique().tolist() == objective.times.times[1:].tolist()
    assert type(objective.pairs.distance).__name__ == "SumOfAbsolutes"
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert resolve(str(tmp_path / "recipe.toml")) == recipe
    train(recipe, tmp_path / "run")
    assert all(line["loss"] > 0 for line in lines(tmp_path / "run" / "1-consistency") if "loss" in line)
    record = read_run(tmp_path / "run")
    assert "<svg" in time_distributions(record.recipe, record.stages, {s.name: 0 for s in record.stages}, None)


ICT = (
    "consistency.times={kind='test_own_times:GrowingGrid', every=2, first=2, last=8}",
    "consistency.curriculum={kind='test_own_times:Neighbours', every=2, first=2, last=8}",
    "consistency.distance={kind='pseudo_huber', c=0.03}",
)


def karras(N: int, low: float, high: float) -> list[float]:
    """σ_i = (ε^(1/ρ) + (i − 1)/(N − 1) (T^(1/ρ) − ε^(1/ρ)))^ρ, i = 1, …, N."""
    return [(low ** (1 / 7) + i / (N - 1) * (high ** (1 / 7) - low ** (1 / 7))) ** 7 for i in range(N)]


def test_pairs_are_neighbours_on_the_grid_of_their_step() -> None:
    recipe = tiny_recipe(8, *ICT, "consistency.teacher=none", "network.dropout=0.0")
    objective = recipe.stages["consistency"].build(recipe)
    models = {"student": Exact(gaussian_consistency(0.5), (1, 8, 8))}
    batch = Batch.whole(torch.zeros(400, 1, 8, 8))
    for step, N in enumerate([3, 3, 5, 5, 9, 9, 9, 9]):
        drawn = objective.draw(models, batch, step, SampleStreams(range(400)))
        delta = objective.pairs.curriculum.delta(drawn.t, step)
        grid = torch.tensor(karras(N, recipe.t_min, recipe.t_max), dtype=torch.float64)
        upper, lower = ((x[:, None] / grid - 1).abs().min(1) for x in (drawn.t, drawn.t - delta))
        assert upper.values.max() < 1e-9
        assert lower.values.max() < 1e-6, "a difference of two times"
        assert (upper.indices - lower.indices == 1).all()
        marks = torch.tensor(norm.cdf(grid.log().numpy(), -1.1, 2.0))
        expected = marks.diff() / (marks[-1] - marks[0])
        found = torch.bincount(upper.indices - 1, minlength=N - 1) / 400
        assert (found - expected).abs().max() < 4 * 0.5 / 20, "four standard deviations"
        weights = objective.pairs.weighting(drawn.t, delta, 0.5)
        torch.testing.assert_close(weights * (grid[upper.indices] - grid[lower.indices]), torch.ones_like(weights))


def test_a_growing_grid_is_trained_and_reported(tmp_path: Path) -> None:
    recipe = tiny_recipe(6, *ICT, "consistency.log_every=1", "order=['diffusion', 'consistency']")
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert resolve(str(tmp_path / "recipe.toml")) == recipe
    train(recipe, tmp_path / "run")
    found = [line["points"] for line in lines(tmp_path / "run" / "1-consistency") if "loss" in line]
    assert found == [3, 3, 5, 5, 9, 9]
    record = read_run(tmp_path / "run")
    page = stability([ObservedRun(record, [], None)])
    assert "points over steps" in page
    assert "ratio" not in page, "no stage of this run has one"
    colours = {stage.name: index for index, stage in enumerate(record.stages)}
    stages = [stage for stage in record.stages if stage.name == "consistency"]
    fixed = recipe.stages["consistency"].model_copy(update={"times": Grid(9, bounds=(recipe.t_min, recipe.t_max))})
    at_the_end = [replace(stages[0], spec=fixed)]
    assert time_distributions(recipe, stages, colours, None) == time_distributions(recipe, at_the_end, colours, None)


def test_a_spacing_says_how_long_it_changes() -> None:
    recipe = tiny_recipe(6, *ICT, "consistency.steps=until-flat")
    assert (recipe.stages["consistency"].steps, recipe.stages["consistency"].until_flat) == (16, True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("consistency.curriculum.kind=ration", "consistency.curriculum.kind='ration' is unknown; did you mean 'ratio'"),
        ("truncated.curriculum.kind=test_own_times:Grid", "kind='test_own_times:Grid' is not a subclass of Spacing"),
        (
            "consistency.curriculum={kind='test_own_times:Neighbours', every=2, evry=1}",
            "consistency.curriculum.evry is not a known key; did you mean 'every'",
        ),
        ("consistency.times.kind=lognorml", "consistency.times.kind='lognorml' is unknown; did you mean 'lognormal'"),
        ("consistency.distance.kind=l3", "consistency.distance.kind='l3' is unknown; use one of pseudo_huber, sq"),
        (
            "consistency.distance.kind=test_own_times:Grid",
            "consistency.distance.kind='test_own_times:Grid' is not a subclass of Distance",
        ),
        ("consistency.times={kind='test_own_times:Grid', point=3}", "consistency.times.point is not a known key"),
    ],
)
def test_what_is_wrong_is_named(word: str, message: str) -> None:
    with pytest.raises(TcmError, match=message):
        tiny_recipe(4, word)
