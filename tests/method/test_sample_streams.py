"""Streams of randomness per sample."""

from math import cos, log, pi, sin, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tcm import SampleStreams
from tcm.foundation.randomness import derive_seed


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


def test_derived_seeds_differ_and_have_128_bits() -> None:
    parts = [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0, "a", 1, 0), ("0", "a", 1)]
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(2**100 < seed < 2**128 for seed in seeds)


def test_every_bit_of_a_seed_counts() -> None:
    """torch's own generator takes 32 bits of a seed on a CPU: among 50,000 images some would be the same."""
    seeds = [0, *(1 << bit for bit in range(128))]
    first_numbers = SampleStreams(seeds).normal((1, 4, 4))[:, 0, 0, 0].tolist()
    assert len(set(first_numbers)) == len(seeds)


def test_draws_of_a_stream_do_not_overlap() -> None:
    streams = SampleStreams([7])
    drawn = torch.cat([streams.normal((1000,))[0] for _ in range(5)])
    assert len(drawn.unique()) > 4990


def philox_4x64(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x64-10 as published (Salmon et al. 2011), in Python's integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b % 2**64, (a >> 64) ^ c3 ^ k1, a % 2**64
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
    return [c0, c1, c2, c3]


@given(st.integers(0, 2**128 - 1))
def test_the_numbers_are_those_of_philox_and_box_muller(seed: int) -> None:
    """Computed independently: the definition of a sample's noise, for any machine, version or language."""
    key = (seed % 2**64, seed >> 64)
    streams = SampleStreams([seed])
    assert float(streams.uniform()) == (philox_4x64(key, (1, 0, 0, 0))[0] >> 11) / 2**53
    expected = []
    for word in philox_4x64(key, (1, 0, 0, 1)) + philox_4x64(key, (2, 0, 0, 1))[:1]:
        radius, angle = sqrt(-2 * log((word % 2**32 + 0.5) / 2**32)), 2 * pi * (word >> 32) / 2**32
        expected += [radius * cos(angle), radius * sin(angle)]
    torch.testing.assert_close(streams.normal((3, 3))[0].flatten().tolist(), expected[:9], rtol=1e-6, atol=1e-7)


def test_global_state_is_untouched() -> None:
    before = torch.get_rng_state()
    streams = SampleStreams([1, 2])
    streams.uniform(), streams.normal((3,)), streams.bernoulli((3,), 0.5)
    assert torch.equal(before, torch.get_rng_state())
