"""Eq. 3 and its coefficients; precision; the learned uncertainty."""

from math import hypot

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import Exact, Formula, gaussian_consistency
from torch import Tensor

from tcm import Classes, DDPMppConfig, Denoiser, EDM2Config, Labels, Uncertainty
from tcm.foundation.errors import TcmError
from tcm.method.preconditioning import EDM, Shifted, c_in, c_noise, c_out, c_skip


@given(st.floats(1e-6, 1e4), st.floats(0.05, 5))
def test_coefficients_keep_unit_variance(t: float, sigma: float) -> None:
    """EDM's conditions: var(c_in x_t) = 1, var(x − c_skip x_t) = c_out², for data of variance σ²."""
    time = torch.tensor(t, dtype=torch.float64)
    assert float(c_in(time, sigma) ** 2 * (sigma**2 + t**2)) == pytest.approx(1)
    residual = (1 - c_skip(time, sigma)) ** 2 * sigma**2 + c_skip(time, sigma) ** 2 * t**2
    assert float(residual / c_out(time, sigma) ** 2) == pytest.approx(1, rel=1e-6)
    assert float((4 * c_noise(time)).exp()) == pytest.approx(t)


@given(st.floats(1e-6, 1e4), st.floats(0.05, 5), st.floats(0, 1))
def test_shifted_coefficients(t: float, sigma: float, epsilon: float) -> None:
    """CM's formulas in Python's numbers; with ε = 0 they are EDM's, and c_in and c_noise always are."""
    time, cm = torch.tensor(t, dtype=torch.float64), Shifted(epsilon)
    assert float(cm.c_skip(time, sigma)) == pytest.approx(sigma**2 / ((t - epsilon) ** 2 + sigma**2))
    assert float(cm.c_out(time, sigma)) == pytest.approx(sigma * (t - epsilon) / hypot(sigma, t))
    for made in (EDM(), Shifted(0.0)):
        assert float(made.c_skip(time, sigma)) == float(c_skip(time, sigma))
        assert float(made.c_out(time, sigma)) == pytest.approx(float(c_out(time, sigma)))
    for made in (EDM(), cm):
        assert float(made.c_in(time, sigma)) == float(c_in(time, sigma))
        assert float(made.c_noise(time, sigma)) == float(c_noise(time))


@given(st.floats(1e-4, 1.0), st.floats(0.05, 5), st.sampled_from([torch.float32, torch.float64]))
def test_shifted_is_the_identity_at_epsilon_for_any_network(epsilon: float, sigma: float, dtype: torch.dtype) -> None:
    shape = (1, 2, 2)
    f = Denoiser(Formula(lambda x, t, labels: 100 + x.cos()), shape, sigma_data=sigma, preconditioning=Shifted(epsilon))
    x = torch.linspace(-3, 3, 8).view(2, *shape)
    torch.testing.assert_close(f(x, torch.full((2,), epsilon, dtype=dtype)), x)
    assert not torch.allclose(f(x, torch.full((2,), 2 * epsilon, dtype=dtype)), x)


def test_a_time_of_identity_below_zero() -> None:
    with pytest.raises(TcmError, match=r"epsilon=-0.1, the time at which f is the identity, must be at least 0"):
        Shifted(-0.1)


def test_denoiser_is_the_papers_formula_around_any_network() -> None:
    shape = (1, 3, 5)
    wrapped = Denoiser(Formula(gaussian_consistency(0.7)), shape)
    exact = Exact(gaussian_consistency(0.7), shape)
    x, t = torch.randn(6, *shape) * 10, torch.tensor([1e-6, 0.002, 0.1, 1.0, 10.0, 80.0], dtype=torch.float64)
    torch.testing.assert_close(wrapped(x, t), exact(x, t), rtol=1e-4, atol=1e-5)


CONFIGS = [
    DDPMppConfig(channels=32, channel_mult=(1, 2), blocks=1, attention=(4,), dropout=0.1),
    EDM2Config(channels=64, channel_mult=(1, 1), blocks=1, attention=(4,), dropout=0.1),
]


def denoise(f: Denoiser, t: Tensor) -> Tensor:
    x = t.float()[:, None, None, None] * torch.randn(len(t), 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return f(x, t, Labels(torch.tensor([0, 1, -1])[: len(t)]))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_networks_under_float32_preconditioning(config, dtype: torch.dtype) -> None:
    f = Denoiser(config.build((1, 8, 8), Classes(2)), (1, 8, 8), Classes(2))
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    t = torch.tensor([0.002, 1.0, 80.0], dtype=torch.float64)
    with torch.no_grad():
        full = denoise(f, t)
        f.network.to(dtype)
        seen: list[torch.dtype] = []
        f.network.conv_out.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
        half = denoise(f, t)
    assert seen == [dtype]
    assert half.dtype == torch.float32
    assert bool(half.isfinite().all())
    # The network's output is rounded, f's x is not: at t = 0.002 nearly all of f is x.
    torch.testing.assert_close(half[0], full[0], rtol=0, atol=2e-4)
    scale = float(full.std())
    assert float((half - full).abs().max()) < (0.02 if dtype == torch.float16 else 0.15) * scale


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_extreme_times_and_images_stay_finite(config) -> None:
    f = Denoiser(config.build((1, 8, 8), None), (1, 8, 8))
    for dtype in (torch.float32, torch.float16):
        f.network.to(dtype)
        for t in (1e-6, 0.002, 80.0, 1e4):
            x = (1 + t) * 6 * torch.ones(1, 1, 8, 8)
            assert bool(f(x, torch.tensor([t], dtype=torch.float64)).isfinite().all()), (dtype, t)


def test_uncertainty_is_a_normalised_linear_map_of_fourier_features() -> None:
    u = Uncertainty(64)
    t = torch.tensor([0.1, 1.0])
    features = 2**0.5 * torch.cos(t[:, None] * u.freqs + u.phases)
    direction = u.weight[0] / u.weight[0].norm()
    torch.testing.assert_close(u(t), features @ direction, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        u.weight.mul_(100)
    torch.testing.assert_close(u(t), features @ direction, rtol=1e-3, atol=1e-4)
