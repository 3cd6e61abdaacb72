"""Distances and weightings against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tcm import PseudoHuber, SquaredL2
from tcm.foundation.errors import TcmError
from tcm.method.distances import general, inverse_c_out_squared, inverse_delta, uniform


def test_squared_l2_sums_over_all_pixels_of_a_sample() -> None:
    x, y = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5)
    expected = ((x - y).double().numpy() ** 2).sum((1, 2, 3))
    np.testing.assert_allclose(SquaredL2()(x, y).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("c", [1e-8, 0.06, 1.0])
@given(exponent=st.floats(-9, 3))
def test_pseudo_huber_is_exact_from_far_below_c_to_far_above(c: float, exponent: float) -> None:
    """In float32 √(d² + c²) − c loses all digits where d ≪ c."""
    size = np.float32(10**exponent)
    found = float(PseudoHuber(c)(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), float(size))))
    d = np.longdouble(size)
    wide = np.longdouble(c)
    assert found == pytest.approx(float(d**2 / (np.sqrt(d**2 + wide**2) + wide)), rel=1e-5, abs=1e-37)


@pytest.mark.parametrize("c", [1e-8, 0.06])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-4, 1.0, 100.0])
def test_gradient_of_pseudo_huber_is_bounded_by_one(c: float, size: float) -> None:
    x = torch.full((1, 1, 1, 1), size, requires_grad=True)
    PseudoHuber(c)(x, torch.zeros(1, 1, 1, 1)).sum().backward()
    assert float(x.grad) == pytest.approx(size / (size**2 + c**2) ** 0.5, rel=1e-4)


def test_pseudo_huber_without_c_is_refused() -> None:
    with pytest.raises(TcmError, match="c=0"):
        PseudoHuber(0)


def test_weightings_are_omega_over_delta() -> None:
    t, delta = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor([0.1, 0.2], dtype=torch.float64)
    torch.testing.assert_close(inverse_delta(t, delta, 0.5), 1 / delta)
    torch.testing.assert_close(inverse_c_out_squared(t, delta, 0.5), (0.25 + t**2) / (t * 0.5) ** 2)
    assert uniform(t, delta, 0.5).tolist() == [1, 1]
    torch.testing.assert_close(general(lambda t: t**2)(t, delta, 0.5), t**2 / delta)
    torch.testing.assert_close(general(torch.ones_like)(t, delta, 0.5), inverse_delta(t, delta, 0.5))
