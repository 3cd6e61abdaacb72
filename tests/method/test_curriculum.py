"""Δ_t and the ratio: the printed schedules, and what holds for all."""

import math
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tcm import Curriculum
from tcm.foundation.errors import TcmError
from tcm.method.curriculum import SMALLEST_R

CIFAR10, IMAGENET = Curriculum(2, 25_000, 0.999), Curriculum(4, 25_000, 0.9961)
curricula = st.builds(
    Curriculum, st.floats(1.01, 10), st.integers(0, 50_000), st.floats(0.01, 0.9999), st.floats(0, 20)
)


@pytest.mark.parametrize(
    ("curriculum", "iteration", "ratio"),
    [
        (CIFAR10, 1, 0.5),
        (CIFAR10, 25_000, 0.5),
        (CIFAR10, 25_001, 0.75),
        (CIFAR10, 225_000, 1 - 2**-9),
        (CIFAR10, 225_001, 0.999),
        (IMAGENET, 1, 0.75),
        (IMAGENET, 100_000, 1 - 4**-4),
        (IMAGENET, 100_001, 0.9961),
        (Curriculum(d=0, limit=0.999), 1, 0.999),
        (Curriculum(d=0, limit=0.9961), 10**9, 0.9961),
    ],
)
def test_ratio_at_the_papers_iterations(curriculum: Curriculum, iteration: int, ratio: float) -> None:
    """The paper's i counts from 1: ratio = min(1 − 1/q^⌈i/d⌉, limit)."""
    assert curriculum.ratio(iteration - 1) == min(ratio, curriculum.limit)


def test_delta_is_the_papers_formula() -> None:
    t = torch.tensor([0.002, 1.0, 80.0], dtype=torch.float64)
    expected = (1 + 8 / (1 + t.exp())) * 0.001 * t
    torch.testing.assert_close(Curriculum(d=0, limit=0.999).delta(t, 0), expected, rtol=1e-12, atol=0)


@given(curricula, st.floats(1e-4, 1e4), st.integers(0, 10**7))
def test_delta_lies_between_zero_and_t(curriculum: Curriculum, t: float, step: int) -> None:
    times = torch.tensor([t], dtype=torch.float64)
    delta = curriculum.delta(times, step)
    assert 0 < float(delta) < t
    assert float(times - delta) >= SMALLEST_R * (1 - 1e-6)


@given(curricula, st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_ratio_never_falls_and_the_gap_never_grows(curriculum: Curriculum, step: int, later: int) -> None:
    first, second = sorted((step, later))
    assert 0 < curriculum.ratio(first) <= curriculum.ratio(second) <= curriculum.limit
    t = torch.tensor([0.01, 1.0, 70.0], dtype=torch.float64)
    assert bool((curriculum.delta(t, second) <= curriculum.delta(t, first)).all())


@pytest.mark.parametrize("settings", [{"limit": 1.0}, {"limit": 0.0}, {"q": 1.0}, {"d": -1}, {"k": -1.0}])
def test_settings_without_a_gap_are_refused(settings: dict) -> None:
    with pytest.raises(TcmError, match="does not keep Δ_t above 0"):
        Curriculum(**settings)


@given(st.builds(Curriculum, st.floats(1.01, 1e300), st.integers(0, 50_000), st.floats(1e-9, 1 - 2**-53)))
def test_its_length_is_the_first_step_at_the_limit(curriculum: Curriculum) -> None:
    steps = count(0, max(curriculum.d, 1))
    assert curriculum.length == next(step for step in steps if curriculum.ratio(step) == curriculum.limit)


@pytest.mark.parametrize("q", [1.0000001, math.nextafter(1, 2)])
def test_a_slow_curriculum_is_not_counted_through(q: float) -> None:
    """At q = 1.0000001 the limit is 69 million intervals away."""
    curriculum = Curriculum(q=q, d=3)
    length = curriculum.length
    assert length == pytest.approx(3 * math.log(1000) / math.log(q), rel=1e-6)
    assert curriculum.ratio(length) == curriculum.limit > curriculum.ratio(length - 1)
