"""A distribution of times and a distance from outside: iCT's grid, and a sum of absolute differences."""

from dataclasses import dataclass, replace
from math import erf, sqrt
from pathlib import Path
from typing import Literal, Self

import pytest
import torch
from inprocess import train
from launching import lines, tiny_recipe
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.method.distances import Distance
from tcm.method.solvers import karras_times
from tcm.method.times import TimeDistribution
from tcm.recipes.resolve import resolve, to_toml
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


@pytest.mark.parametrize(
    ("word", "message"),
    [
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
