"""Means, paired differences and verdicts, against scipy.stats."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from tcm.studies.analysis import Column, Verdict, compare, difference, spikes, summarise

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
    assert compare("other", Column({0: 1.0}), Column({0: 9.0})).outcome == "not seen"
    assert compare("other", Column({0: 9.0}), Column({0: 1.0})).outcome == "not seen"


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


BETTER = seeds(1.0, 1.1, 0.9)
CLEARLY_WORSE, HARDLY_WORSE, HARDLY_BETTER = seeds(3.0, 3.1, 3.0), seeds(1.1, 1.9, 1.0), seeds(1.1, 0.6, 0.8)


@pytest.mark.parametrize(
    ("others", "outcome"),
    [
        ({"a": CLEARLY_WORSE}, "held"),
        ({"a": CLEARLY_WORSE, "b": HARDLY_WORSE}, "leaned that way"),
        ({"a": CLEARLY_WORSE, "b": seeds(0.9, 1.4, 1.2)}, "not seen"),
        ({"a": CLEARLY_WORSE, "b": HARDLY_BETTER}, "not seen"),
        ({"a": CLEARLY_WORSE, "b": seeds(0.0, 0.1, 0.0)}, "contradicted"),
        ({"a": CLEARLY_WORSE, "b": {}}, "not measured"),
        ({"a": BETTER}, "not seen"),
    ],
)
def test_a_verdict_is_that_of_its_weakest_part(others: dict[str, dict[int, float]], outcome: str) -> None:
    comparisons = [compare(name, Column(BETTER), Column(values)) for name, values in others.items()]
    assert Verdict(tuple(comparisons)).outcome == outcome


def test_where_higher_is_better_the_sides_change() -> None:
    assert compare("a", Column(CLEARLY_WORSE), Column(BETTER), lower_is_better=False).outcome == "held"
    assert compare("a", Column(BETTER), Column(CLEARLY_WORSE), lower_is_better=False).outcome == "contradicted"


@pytest.mark.parametrize(("margin", "outcome"), [(0.0, "contradicted"), (-0.01, "not seen"), (-0.05, "held")])
def test_no_worse_allows_a_share_of_the_others_values(margin: float, outcome: str) -> None:
    """2 % of the mean worse."""
    found = compare("a", Column(seeds(1.03, 1.12, 1.22)), Column(seeds(1.0, 1.1, 1.2)), margin=margin)
    assert found.asked == pytest.approx(1.1 * margin)
    assert found.outcome == outcome


@pytest.mark.parametrize(("margin", "outcome"), [(0.5, "held"), (0.7, "not seen"), (0.8, "contradicted")])
def test_a_positive_margin_asks_for_more(margin: float, outcome: str) -> None:
    assert compare("a", Column(BETTER), Column(CLEARLY_WORSE), margin=margin).outcome == outcome


def test_a_margin_is_taken_seed_by_seed() -> None:
    """Each seed is 10 % better, which is 9 to 11 % of the mean."""
    found = compare("a", Column(seeds(0.9, 0.99, 1.08)), Column(seeds(1.0, 1.1, 1.2)), margin=0.09)
    assert found.outcome == "held"
    assert found.beyond is not None
    assert found.beyond.interval == pytest.approx(stats.t.interval(0.95, 2, 0.011, 0.001 / 3**0.5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("margin", "follows", "noise"),
    [(0.15, 0.85, 0.005), (0.15, 1.0, 0.01), (-0.1, 1.0, 0.01), (-0.1, 0.5, 0.02), (-0.05, 0.0, 0.1)],
)
def test_where_the_gain_is_just_the_margin_one_study_in_forty_holds(
    margin: float, follows: float, noise: float
) -> None:
    """Of 10,000 studies of five seeds 2 to 3 % hold, nominally 2.5 %, however closely one variant follows the other.

    With the other's estimated mean as a constant, 0.1, 9.9, 6.2, 4.1 and 2.5 % would.
    """
    generator = np.random.default_rng(0)
    common, own = generator.normal(size=(2, 10_000, 5))
    others, betters = 1 + 0.1 * common, 1 - margin + 0.1 * follows * common + noise * own
    found = [
        compare("a", Column(seeds(*better)), Column(seeds(*other)), margin=margin).outcome == "held"
        for better, other in zip(betters.tolist(), others.tolist(), strict=True)
    ]
    assert 0.02 < np.mean(found) < 0.03


def test_a_seed_that_diverged_counts_against_its_variant() -> None:
    good, gone = Column(BETTER), Column({}, diverged={0, 1, 2})
    assert compare("a", good, gone).outcome == "held"
    assert compare("a", good, Column({}, diverged={1})).outcome == "leaned that way"
    assert compare("a", gone, good).outcome == "not seen"
    with_one_gone = Column({0: 1.0, 1: 1.1}, diverged={2})
    assert compare("a", with_one_gone, Column(CLEARLY_WORSE)).outcome == "not seen"
    assert compare("a", with_one_gone, Column({0: 3.0, 1: 3.1}, diverged={2})).outcome == "held"


def test_without_a_seed_in_common_a_variant_that_diverged_does_not_hold() -> None:
    also_gone = compare("o", Column({3: 1.0, 4: 1.0}, {0, 1, 2}), Column(seeds(1.0, 1.0, 1.0), {3, 4}))
    assert (also_gone.outcome, also_gone.diverged, also_gone.other_diverged) == ("not seen", 3, 2)
    assert compare("o", Column({}), Column({}, {0, 1})).outcome == "not measured"
    assert compare("o", Column({5: 1.0}), Column({}, {0, 1})).outcome == "not measured"


def test_spikes_stand_out_from_what_is_usual_around_them() -> None:
    course = np.geomspace(100, 1, 200)
    assert spikes(course, course * 1.5) == []
    largest = course * 1.5
    largest[[20, 150]] *= 4
    largest[180] = np.nan
    assert spikes(course, largest) == [20, 150, 180]
