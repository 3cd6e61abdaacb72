"""Solvers and samplers against exact trajectories."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import Exact, Formula, finite_denoiser, follow_pf_ode, gaussian_consistency, gaussian_denoiser
from torch import Tensor

from tcm import Classes, DDPMppConfig, Denoiser, EDM2Config, Labels, SampleStreams
from tcm.foundation.errors import TcmError
from tcm.method.sampling import (
    ConsistencySampler,
    HeunSampler,
    check_times,
    consistency_steps,
    consistency_times,
    heun_steps,
    last,
)
from tcm.method.solvers import euler, guided, heun, karras_times

S = 0.5
SHAPE = (1, 2, 2)
POINTS = torch.tensor(
    [
        [-0.9, -0.8, 0.7, 0.9],
        [0.8, 0.9, -0.7, -0.9],
        [0.9, -0.9, 0.8, -0.8],
        [0.1, 0.9, 0.2, 0.8],
        [-0.5, 0.4, -0.6, 0.3],
    ]
).view(-1, *SHAPE)


class Counting(Exact):
    """Counts its evaluations."""

    evaluations = 0

    def forward(self, *arguments) -> Tensor:
        self.evaluations += 1
        return super().forward(*arguments)


@pytest.mark.parametrize(("step", "order"), [(euler, 2), (heun, 3)])
def test_error_of_one_step_on_gaussian_data(step, order: int) -> None:
    """x_r = x_t √((s² + r²)/(s² + t²)) exactly; one step of a solver of order p errs by O(Δ^(p+1))."""
    denoise = guided(Exact(gaussian_denoiser(S), SHAPE), None)
    x_t = torch.randn(4, *SHAPE, dtype=torch.float64)
    t, errors, fractions = torch.full((4,), 0.8, dtype=torch.float64), [], np.geomspace(0.1, 0.001, 6)
    for fraction in fractions:
        r = t * (1 - fraction)
        exact = x_t * ((S**2 + r**2) / (S**2 + t**2)).sqrt()[:, None, None, None]
        errors.append(float((step(denoise, x_t, t, r) - exact).detach().norm()))
    assert np.polyfit(np.log(fractions), np.log(errors), 1)[0] == pytest.approx(order, abs=0.05)


def test_heuns_sampler_reproduces_the_pf_ode_of_a_finite_data_set() -> None:
    denoise, x_T = finite_denoiser(POINTS), 80.0 * SampleStreams(range(8)).normal(SHAPE)
    exact = follow_pf_ode(denoise, x_T, 80.0, 1e-5)
    assert float((exact[:, None] - POINTS.double()).flatten(2).norm(dim=2).min(1).values.max()) < 1e-3  # all arrive
    for D in (Exact(denoise, SHAPE), Denoiser(Formula(denoise), SHAPE)):
        found = last(heun_steps(D, 18, SampleStreams(range(8))))
        assert float((found.double() - exact).abs().max()) < 1e-3


def test_heuns_sampler_follows_the_pf_ode_on_its_way() -> None:
    """Stopped at t = 0.5, between the points: D of the exact x there, at second order in the steps."""
    denoise, x_T = finite_denoiser(POINTS), 80.0 * SampleStreams(range(8)).normal(SHAPE)
    x = follow_pf_ode(denoise, x_T, 80.0, 0.5)
    exact = denoise(x, torch.full((8, 1, 1, 1), 0.5, dtype=torch.float64), None)
    errors = []
    for steps in (10, 20, 40, 80):
        found = last(heun_steps(Exact(denoise, SHAPE, t_min=0.5), steps, SampleStreams(range(8))))
        errors.append(float((found.double() - exact).norm()))
    assert errors[-1] < 5e-3
    assert np.polyfit(np.log([10, 20, 40, 80]), np.log(errors), 1)[0] == pytest.approx(-2, abs=0.3)


def test_heuns_error_falls_with_the_square_of_the_steps() -> None:
    D = Exact(gaussian_denoiser(S), SHAPE)
    x_T = 80.0 * SampleStreams(range(8)).normal(SHAPE).double()
    exact = x_T * S / (S**2 + 80.0**2) ** 0.5
    errors = [
        float((last(heun_steps(D, n, SampleStreams(range(8)))).double() - exact).abs().max()) for n in (10, 20, 40)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.4)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.4)


@pytest.mark.parametrize("steps", [1, 2, 18])
def test_count_of_heuns_evaluations(steps: int) -> None:
    D = Counting(gaussian_denoiser(S), SHAPE)
    last(heun_steps(D, steps, SampleStreams([0])))
    assert D.evaluations == 2 * steps - 1


def test_sampling_from_a_given_noise() -> None:
    """The streams' own first noise gives their own samples; another noise gives others, Heun's not from the streams."""
    f = Exact(gaussian_denoiser(S), SHAPE)
    own, other = (SampleStreams(seeds).normal(SHAPE) for seeds in ([0, 1], [2, 3]))
    for sampler in (HeunSampler(), ConsistencySampler()):
        expected = last(sampler.run(f, SampleStreams([0, 1]), steps=1))
        assert torch.equal(last(sampler.run(f, SampleStreams([8, 9]), steps=1, first=own)), expected)
        assert not torch.equal(last(sampler.run(f, SampleStreams([0, 1]), steps=1, first=other)), expected)


def test_guidance_doubles_the_evaluations_and_moves_towards_the_class() -> None:
    labels = torch.tensor([0, 1, 0, 1, 0])
    D = Counting(finite_denoiser(POINTS, labels), SHAPE)
    wanted = torch.tensor([1, 1, 0, 0])
    found = last(heun_steps(D, 18, SampleStreams(range(4)), Labels(wanted), guidance=1.5))
    assert D.evaluations == 2 * 35
    nearest = (found[:, None] - POINTS).flatten(2).norm(dim=2).argmin(1)
    assert torch.equal(labels[nearest], wanted)


def test_guidance_of_scale_one_and_of_no_labels_is_none() -> None:
    D = Counting(finite_denoiser(POINTS, torch.tensor([0, 1, 0, 1, 0])), SHAPE)
    x, t = torch.zeros(2, *SHAPE), torch.ones(2)
    guided(D, Labels(torch.tensor([0, 1])), 1.0)(x, t)
    guided(D, None, 4.0)(x, t)
    assert D.evaluations == 2


def test_one_step_of_the_exact_function_is_exact() -> None:
    f = Exact(gaussian_consistency(S), SHAPE)
    found = last(consistency_steps(f, [80.0], SampleStreams(range(100))))
    exact = 80.0 * SampleStreams(range(100)).normal(SHAPE) * S / (S**2 + 80.0**2) ** 0.5
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("times", [[80.0, 1.0], [80.0, 20.0, 3.0, 0.5]])
def test_more_steps_keep_the_distribution(times: list[float]) -> None:
    f = Exact(gaussian_consistency(S), SHAPE)
    found = last(consistency_steps(f, times, SampleStreams(range(4000))))
    assert float(found.std()) == pytest.approx(S, rel=0.03)
    assert float(found.mean()) == pytest.approx(0, abs=0.02)


def test_two_steps_follow_the_formula() -> None:
    f, streams, again = Exact(gaussian_consistency(S), SHAPE), SampleStreams([3]), SampleStreams([3])
    first, second = again.normal(SHAPE), again.normal(SHAPE)
    with torch.no_grad():
        expected = f(f(80 * first, torch.tensor([80.0])) + 1.5 * second, torch.tensor([1.5]))
    torch.testing.assert_close(last(consistency_steps(f, [80.0, 1.5], streams)), expected)


NETWORKS = [
    DDPMppConfig(channels=16, channel_mult=(1, 2), blocks=1, attention=(4,), dropout=0.2),
    EDM2Config(channels=64, channel_mult=(1, 1), blocks=1, attention=(4,), dropout=0.2),
]


@pytest.mark.parametrize("config", NETWORKS, ids=lambda config: config.kind)
@pytest.mark.parametrize("sampler", ["consistency", "heun"])
def test_an_image_is_a_function_of_its_seed_and_not_of_its_batch(config, sampler: str) -> None:
    """Inputs are the same to the bit; convolutions may sum in another order in another batch, hence the tolerance."""
    f = Denoiser(config.build((1, 8, 8), Classes(3)), (1, 8, 8), Classes(3))
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    def sample(seeds: list[int]) -> Tensor:
        labels = Labels(torch.tensor([seed % 3 for seed in seeds]))
        if sampler == "heun":
            return last(heun_steps(f, 3, SampleStreams(seeds), labels))
        return last(consistency_steps(f, [80.0, 1.0], SampleStreams(seeds), labels))

    whole = sample(list(range(7)))
    for seeds in ([4], [6, 0], [5, 4, 3, 2, 1]):
        torch.testing.assert_close(sample(seeds), whole[seeds], rtol=1e-4, atol=1e-5)
    assert float((whole[0] - whole[3]).abs().max()) > 0.01  # same class, another seed


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([80.0, 0.821], r"times\[1\]=0.821 is below 1, where this model is undefined; use a time of at least 1"),
        ([1.0], r"times\[0\]=1 is not T=80.0, where sampling starts from noise; use 80.0 as the first time"),
        ([4.0, 1.0], r"times\[0\]=4 is not T=80.0"),
        ([81.0], r"times\[0\]=81 is not T=80.0"),
        ([float("nan")], r"times\[0\]=nan is not T"),
        ([80.0, 81.0], r"times\[1\]=81 is above 80, where this model is undefined; use a time of at most 80"),
        ([80.0, float("nan")], r"times\[1\]=nan is below 1"),
        ([80.0, float("inf")], r"times\[1\]=inf is above 80"),
        ([], "times is empty"),
        ([80.0, 2.0, 4.0], r"times\[2\]=4 is not below times\[1\]; sort the times in descending order"),
        ([80.0, 80.0], r"times\[1\]=80 is not below"),
    ],
)
def test_times_where_the_model_is_undefined_are_errors(times: list[float], message: str) -> None:
    f = Exact(gaussian_consistency(S), SHAPE, t_min=1.0)
    with pytest.raises(TcmError, match=message):
        last(consistency_steps(f, times, SampleStreams([0])))


@given(st.integers(1, 50), st.floats(0.1, 79.9))
def test_times_of_any_number_of_steps_are_allowed_times(steps: int, last: float) -> None:
    times = consistency_times(steps, 80.0, last)
    assert len(times) == steps
    assert times[0] == 80.0
    assert steps == 1 or times[-1] == last
    check_times(Exact(gaussian_consistency(S), SHAPE, t_min=0.1), times)


@given(st.integers(2, 100), st.floats(1e-4, 1.0), st.floats(1.1, 200.0))
def test_karras_times_fall_from_end_to_end(steps: int, t_min: float, t_max: float) -> None:
    times = karras_times(steps, t_min, t_max)
    assert (len(times), times[0], times[-1]) == (steps, t_max, t_min)
    assert bool((np.diff(times) < 0).all())
    np.testing.assert_allclose(np.diff(np.power(times, 1 / 7), n=2), 0, atol=1e-9)


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_an_error(steps: int) -> None:
    with pytest.raises(TcmError, match=f"steps={steps}"):
        consistency_times(steps, 80.0, 1.0)
    with pytest.raises(TcmError, match=f"steps={steps}"):
        karras_times(steps, 0.002, 80.0)
    assert karras_times(1, 0.002, 80.0) == [80.0]


def test_sampling_leaves_no_graph_and_no_global_state() -> None:
    before = torch.get_rng_state()
    f = Exact(gaussian_consistency(S), SHAPE)
    assert not last(consistency_steps(f, [80.0, 1.0], SampleStreams([0]))).requires_grad
    assert not last(heun_steps(f, 3, SampleStreams([0]))).requires_grad
    assert torch.equal(torch.get_rng_state(), before)
