"""Times against golden quantiles, scipy in other words, and their support."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tcm import LogNormal, LogStudentT, SampleStreams
from tcm.foundation.errors import TcmError
from tcm.method.times import TimeDistribution, _table


@pytest.mark.parametrize(
    "name", ["lognormal_cifar_stage1", "lognormal_imagenet_stage1", "logstudentt_stage2", "logstudentt_xl_t15"]
)
def test_quantiles_are_the_references(numbers, name: str) -> None:
    given = numbers[name]
    arguments = (given["mean"], given["std"], given["low"], given["high"])
    distribution = LogStudentT(*arguments, nu=given["df"]) if "df" in given else LogNormal(*arguments)
    found = distribution.quantile(torch.tensor(numbers["u"], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(given["quantiles"], dtype=torch.float64), rtol=1e-5, atol=0)


@st.composite
def distributions(draw) -> TimeDistribution:
    """Far beyond anything sensible: tails of 25 standard deviations, ranges of a part in a million, any ν."""
    low = 10 ** draw(st.floats(-6, 3))
    high = low * (1 + 10 ** draw(st.floats(-6, 6)))
    std = 10 ** draw(st.floats(-2, 2))
    mean = draw(st.floats(math.log(low) - 25 * std, math.log(high) + 25 * std))
    if draw(st.booleans()):
        return LogNormal(mean, std, low, high)
    return LogStudentT(mean, std, low, high, nu=10 ** draw(st.floats(-2, 4)))


@given(distributions(), st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_times_lie_inside_their_support_and_in_order(distribution: TimeDistribution, u: list[float]) -> None:
    _table.cache_clear()
    t = distribution.quantile(torch.tensor([0.0, *sorted(u), 1.0], dtype=torch.float64))
    assert bool(((t >= distribution.low) & (t <= distribution.high)).all())
    assert bool((t.diff() >= 0).all())


@given(distributions(), st.floats(0.001, 0.999))
def test_quantiles_invert_scipys_distribution(distribution: TimeDistribution, u: float) -> None:
    """P(t < quantile(u)) = u to a table cell's width in ln t, by scipy's function for the tail that the range is in."""
    _table.cache_clear()
    standard = stats.norm if isinstance(distribution, LogNormal) else stats.t(distribution.nu)
    flip = distribution.mean < math.log(distribution.low)  # the whole range in the upper tail
    z = [(math.log(t) - distribution.mean) / distribution.std for t in (distribution.low, distribution.high)]
    low, high = (standard.sf(z[0]), standard.sf(z[1])) if flip else (standard.cdf(z[0]), standard.cdf(z[1]))
    found = float(distribution.quantile(torch.tensor([u]).double()))
    cell = (math.log(distribution.high) - math.log(distribution.low)) / (2**15 - 1)

    def fraction(ln_t: float) -> float:
        at = (ln_t - distribution.mean) / distribution.std
        return ((standard.sf(at) if flip else standard.cdf(at)) - low) / (high - low)

    if abs(high - low) < 1e-12 * max(low, high):
        return  # scipy's own difference has no digits left
    assert fraction(math.log(found) - 1.01 * cell) <= u + 1e-4
    assert fraction(math.log(found) + 1.01 * cell) >= u - 1e-4


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kind", [LogNormal, LogStudentT])
def test_nothing_overflows(kind: type[LogNormal | LogStudentT]) -> None:
    """A deviation beyond the largest number counts as a large one."""
    for std in (5e-324, 1e-200):
        narrow = kind(1.0, std, 1.0, 80.0)
        t = narrow.quantile(torch.tensor([0.5]))
        assert float(t) == pytest.approx(math.e, rel=1e-3)
        assert bool(narrow.density(torch.tensor([1.0, 80.0])).isfinite().all())
    for mean, std in ((1e308, 1e-3), (-1e308, 1e308)):
        with pytest.raises(TcmError, match="no probability"):
            kind(mean, std, 1.0, 80.0).quantile(torch.tensor([0.5]))


def test_log_normal_draws_are_those_of_scipys_truncated_normal() -> None:
    distribution = LogNormal(-1.1, 2.0)
    t = distribution.sample(20_000, torch.Generator().manual_seed(0))
    ends = [(math.log(end) + 1.1) / 2.0 for end in (0.002, 80)]
    truth = stats.truncnorm(*ends, loc=-1.1, scale=2.0)
    assert stats.kstest(t.log().numpy(), truth.cdf).pvalue > 0.01


@pytest.mark.parametrize(
    "distribution", [LogNormal(-1.1, 2.0), LogStudentT(0, 0.2, 1.0), LogStudentT(0, 0.2, 1.5, nu=2)]
)
def test_density_is_the_quantiles_derivative_and_zero_outside(distribution: TimeDistribution) -> None:
    u = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    step = 1e-3
    slope = (distribution.quantile(u + step) - distribution.quantile(u - step)) / (2 * step)
    torch.testing.assert_close(distribution.density(distribution.quantile(u)), 1 / slope, rtol=0.02, atol=0)
    low, high = distribution.span
    grid = torch.logspace(np.log10(low), np.log10(high), 20_001, dtype=torch.float64)
    assert float(torch.trapezoid(distribution.density(grid), grid)) == pytest.approx(1, abs=1e-3)
    outside = torch.tensor([0.0, low * 0.999, high * 1.001], dtype=torch.float64)
    assert distribution.density(outside).tolist() == [0, 0, 0]


def test_drawing_is_a_function_of_the_generator() -> None:
    first, second = (LogStudentT(0, 0.2).sample(8, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    before = torch.get_rng_state()
    LogStudentT(0, 0.2).sample(8, torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_scipy_is_not_called_again_for_each_draw(monkeypatch) -> None:
    distribution = LogStudentT(0, 0.2, 1.0, 80.0, nu=0.017)
    distribution.quantile(torch.rand(4))

    def fail(self, z) -> None:
        raise AssertionError

    monkeypatch.setattr(LogStudentT, "cdf", fail)
    LogStudentT(0, 0.2, 1.0, 80.0, nu=0.017).quantile(SampleStreams([0]).uniform())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LogNormal(0, 1, 2.0, 1.0), "low=2"),
        (lambda: LogNormal(0, 1, 0.0, 1.0), "low=0"),
        (lambda: LogNormal(0, 1, 1.0, math.inf), "high=inf"),
        (lambda: LogNormal(0, 0.0), "std=0"),
        (lambda: LogNormal(0, math.nan), "std=nan"),
        (lambda: LogStudentT(0, 1, nu=0.0), "nu=0"),
        (lambda: LogStudentT(0, 1, nu=-1.0), "nu=-1"),
    ],
)
def test_impossible_distributions_are_refused(make, named: str) -> None:
    with pytest.raises(TcmError, match=named):
        make()


def test_a_range_without_probability_is_refused() -> None:
    with pytest.raises(TcmError, match="no probability between low and high"):
        LogNormal(-100.0, 1.0, 1.0, 80.0).quantile(torch.tensor([0.5]))
