"""Streams of randomness per sample."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tcm import SampleStreams
from tcm.method.streams import derive_seed


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6, unique=True), st.data())
def test_a_sample_draws_the_same_numbers_in_any_batch(seeds: list[int], data) -> None:
    chosen = data.draw(st.permutations(range(len(seeds)))).copy()[: data.draw(st.integers(1, len(seeds)))]
    streams, some = SampleStreams(seeds), SampleStreams([seeds[place] for place in chosen])
    for draw in (
        lambda s: s.uniform(),
        lambda s: s.normal((3, 5)),
        lambda s: s.bernoulli((2, 3), 0.3),
        lambda s: s.normal((1, 4, 4)),
    ):
        assert torch.equal(draw(streams)[chosen], draw(some))


def test_moments() -> None:
    streams = SampleStreams(range(200))
    assert stats.kstest(streams.normal((100,)).flatten().numpy(), "norm").pvalue > 0.01
    assert stats.kstest(streams.uniform().numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(streams.normal((100,))[:, 0].numpy(), "norm").pvalue > 0.01


@pytest.mark.parametrize("probability", [0.0, 1e-6, 0.2, 0.8, 1 - 1e-6, 1.0])
def test_share_of_bernoulli(probability: float) -> None:
    kept = SampleStreams(range(100)).bernoulli((5, 201), probability)
    assert kept.shape == (100, 5, 201)
    assert float(kept.float().mean()) == pytest.approx(probability, abs=0.005)


def test_derived_seeds_differ_and_fit_a_generator() -> None:
    parts = [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0, "a", 1, 0), ("0", "a", 1)]
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_global_state_is_untouched() -> None:
    before = torch.get_rng_state()
    streams = SampleStreams([1, 2])
    streams.uniform(), streams.normal((3,)), streams.bernoulli((3,), 0.5)
    assert torch.equal(before, torch.get_rng_state())
