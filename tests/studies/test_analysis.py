"""Means, paired differences and verdicts, against scipy.stats."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from tcm.studies.analysis import difference, judge, spikes, summarise

NUMBERS = st.floats(-1e3, 1e3).map(lambda value: round(value, 3))


@given(st.lists(NUMBERS, min_size=2, max_size=8))
def test_a_summary_is_that_of_scipy(values: list[float]) -> None:
    assume(np.ptp(values) > 0.1)
    found = summarise(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values))
    assert found.deviation == pytest.approx(stats.tstd(values))
    expected = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert found.interval == pytest.approx(expected)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=8))
def test_a_paired_difference_is_that_of_scipy(pairs: list[tuple[float, float]]) -> None:
    first, second = (dict(enumerate(side)) for side in zip(*pairs, strict=True))
    apart = np.subtract(list(first.values()), list(second.values()))
    assume(np.ptp(apart) > 0.1)
    found = difference(first, second)
    assert found is not None
    test = stats.ttest_rel(list(first.values()), list(second.values()))
    expected = test.confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))
    assume(abs(test.pvalue - 0.05) > 1e-6)
    assert found.certain == (test.pvalue < 0.05)
    assert found.agreeing == sum(one * apart.mean() > 0 for one in apart)


def test_only_seeds_in_common_are_paired() -> None:
    found = difference({0: 1.0, 1: 2.0, 7: 100.0}, {1: 5.0, 0: 3.0, 9: -100.0})
    assert found is not None
    assert (found.count, found.mean) == (2, -2.5)
    assert difference({0: 1.0}, {1: 1.0}) is None
    assert summarise([]) is None


def test_a_single_seed_has_no_interval_and_proves_nothing() -> None:
    found = difference({0: 1.0}, {0: 9.0})
    assert found is not None
    assert found.interval is None
    assert not found.certain
    assert judge({0: 1.0}, {"other": {0: 9.0}}).outcome == "leaned that way"
    assert judge({0: 9.0}, {"other": {0: 1.0}}).outcome == "not seen"


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


BETTER = seeds(1.0, 1.1, 0.9)
CLEARLY_WORSE, HARDLY_WORSE, HARDLY_BETTER = seeds(3.0, 3.1, 3.0), seeds(0.9, 1.4, 1.2), seeds(1.1, 0.6, 0.8)


@pytest.mark.parametrize(
    ("others", "outcome"),
    [
        ({"a": CLEARLY_WORSE}, "held"),
        ({"a": CLEARLY_WORSE, "b": HARDLY_WORSE}, "leaned that way"),
        ({"a": CLEARLY_WORSE, "b": HARDLY_BETTER}, "not seen"),
        ({"a": CLEARLY_WORSE, "b": seeds(0.0, 0.1, 0.0)}, "contradicted"),
        ({"a": CLEARLY_WORSE, "b": {}}, "not measured"),
        ({"a": BETTER}, "not seen"),
    ],
)
def test_verdicts(others: dict[str, dict[int, float]], outcome: str) -> None:
    assert judge(BETTER, others).outcome == outcome


def test_where_higher_is_better_the_sides_change() -> None:
    assert judge(CLEARLY_WORSE, {"a": BETTER}, lower_is_better=False).outcome == "held"
    assert judge(BETTER, {"a": CLEARLY_WORSE}, lower_is_better=False).outcome == "contradicted"


def test_spikes_stand_out_from_what_is_usual_around_them() -> None:
    course = np.geomspace(100, 1, 200)
    assert spikes(course, course * 1.5) == []
    largest = course * 1.5
    largest[[20, 150]] *= 4
    largest[180] = np.nan
    assert spikes(course, largest) == [20, 150, 180]
