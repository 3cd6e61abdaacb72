"""Statistics and the Fréchet distance against scipy and closed forms."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcm.evaluation.statistics import accumulate, extrapolated_distance
from tcm.foundation.errors import TcmError
from tcm.method.gaussians import Statistics, frechet_distance


def correlated(count: int, dimension: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
    return torch.randn(count, dimension, generator=generator, dtype=torch.float64) @ mixing + shift


def by_sqrtm(a: Statistics, b: Statistics) -> float:
    root = scipy.linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy())
    difference = (a.mean - b.mean).numpy()
    return float(difference @ difference + np.trace(a.covariance.numpy() + b.covariance.numpy() - 2 * np.real(root)))


@pytest.mark.parametrize("dimension", [1, 2, 16, 100])
def test_distance_agrees_with_scipys_matrix_square_root(dimension: int) -> None:
    a = Statistics.of(correlated(400, dimension, 0))
    b = Statistics.of(correlated(500, dimension, 1, shift=0.3))
    assert frechet_distance(a, b) == pytest.approx(by_sqrtm(a, b), rel=1e-6)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-9)


def test_distance_of_gaussians_with_a_common_basis_is_the_closed_form() -> None:
    basis = torch.linalg.qr(correlated(12, 12, 3)).Q
    first, second = torch.linspace(0, 4, 12).double(), torch.linspace(3, 0.1, 12).double()
    shift = torch.linspace(-1, 1, 12).double()
    a = Statistics(torch.zeros(12).double(), basis @ torch.diag(first) @ basis.T, 100)
    b = Statistics(shift, basis @ torch.diag(second) @ basis.T, 100)
    expected = float((shift**2).sum() + ((first.sqrt() - second.sqrt()) ** 2).sum())
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-6)


def test_distance_to_a_point_is_the_variance_and_to_itself_zero() -> None:
    a = Statistics.of(correlated(300, 20, 4))
    point = Statistics(a.mean, torch.zeros(20, 20).double(), 1)
    assert frechet_distance(a, point) == pytest.approx(float(a.covariance.trace()), rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_singular_covariances_lose_no_digits() -> None:
    few, many = correlated(10, 64, 5)[:, :64], correlated(40, 64, 6)
    a, b = Statistics.of(few), Statistics.of(many)
    # tr (Σa Σb)^½ by the small Gram matrix of the centred data: exact for low rank.
    left = (few - few.mean(0)) / 3.0
    right = (many - many.mean(0)) / 39**0.5
    cross = torch.linalg.svdvals(left @ right.T).sum()
    expected = (a.mean - b.mean).square().sum() + left.square().sum() + right.square().sum() - 2 * cross
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 2999), max_size=8), offset=st.sampled_from([0.0, 1e4]))
def test_any_partition_gives_the_same_statistics_as_numpy(cuts: list[int], offset: float) -> None:
    features = correlated(3000, 6, 7, shift=offset)
    edges = sorted({0, 3000, *cuts})
    parts = [features[i:j] for i, j in pairwise(edges)]
    streamed = accumulate(parts)
    merged = Statistics.of(parts[0])
    for part in parts[1:]:
        merged = merged.merge(Statistics.of(part))
    for found in (streamed, merged):
        assert found is not None
        assert found.count == 3000
        np.testing.assert_allclose(found.mean, features.numpy().mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.covariance, np.cov(features.numpy().T), rtol=1e-8, atol=1e-8)


def test_streamed_statistics_do_not_depend_on_the_batch_size_to_the_last_bit() -> None:
    features = correlated(2500, 5, 8).float()
    one, other = accumulate(features.split(7)), accumulate(features.split(600))
    assert one is not None
    assert other is not None
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.covariance, other.covariance)


def test_extrapolation_removes_the_bias_of_few_samples() -> None:
    reference = Statistics(torch.zeros(32).double(), torch.eye(32).double(), None)
    features = torch.randn(600, 32, generator=torch.Generator().manual_seed(9))
    biased = frechet_distance(Statistics.of(features), reference)
    assert biased > 0.4  # the truth is 0
    assert abs(extrapolated_distance(features, reference)) < 0.1 * biased


def test_what_cannot_be_measured_is_refused() -> None:
    a, b = Statistics.of(torch.randn(5, 3)), Statistics.of(torch.randn(5, 4))
    with pytest.raises(TcmError, match="3 and 4 dimensions"):
        frechet_distance(a, b)
    with pytest.raises(TcmError, match="NaN"):
        Statistics.of(torch.tensor([[float("nan")]]))
    assert accumulate([]) is None
    with pytest.raises(TcmError, match="count"):
        a.merge(Statistics(a.mean, a.covariance, None))
    with pytest.raises(TcmError, match="at least 8"):
        extrapolated_distance(torch.randn(3, 3), a)
