"""The order is a permutation of each epoch, a pure function, shared without gaps, and fixed for ever."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tcm.data.order import flips, global_batch, permutation, rank_indices
from tcm.foundation.errors import TcmError


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 40), batch=st.integers(1, 60), seed=st.integers(0, 2**63 - 1), start=st.integers(0, 10**12))
def test_consecutive_batches_are_consecutive_epochs(count: int, batch: int, seed: int, start: int) -> None:
    steps = 3 + 3 * count // batch
    joined = np.concatenate([global_batch(count, seed, start + step, batch) for step in range(steps)])
    skipped = -start * batch % count
    whole = joined[skipped : skipped + (len(joined) - skipped) // count * count].reshape(-1, count)
    assert len(whole) >= 1
    np.testing.assert_array_equal(np.sort(whole, axis=1), np.broadcast_to(np.arange(count), whole.shape))


@settings(max_examples=100, deadline=None)
@given(world=st.integers(1, 8), each=st.integers(1, 9), step=st.integers(0, 10**9))
def test_ranks_share_a_batch_without_gaps(world: int, each: int, step: int) -> None:
    batch = world * each
    whole = global_batch(50, 3, step, batch)
    mirrored = flips(3, step, np.arange(batch))
    for rank in range(world):
        indices = rank_indices(batch, rank, world)
        assert indices.tolist() == list(range(rank, batch, world))
        np.testing.assert_array_equal(flips(3, step, indices), mirrored[indices])
    shares = np.stack([whole[rank_indices(batch, rank, world)] for rank in range(world)], axis=1)
    np.testing.assert_array_equal(shares.ravel(), whole)


def test_the_order_is_fixed_for_ever() -> None:
    """A run must resume in the same order under any later version of this package and of numpy."""
    assert global_batch(10, 0, 0, 10).tolist() == [5, 9, 7, 4, 8, 0, 2, 1, 3, 6]
    assert global_batch(50_000, 42, 10_000_000, 6).tolist() == [29270, 31905, 34998, 31881, 9059, 48989]
    assert flips(7, 123, np.arange(16)).astype(int).tolist() == [0, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1]


def test_another_process_computes_the_same() -> None:
    code = "from tcm.data.order import global_batch; print(global_batch(1000, 5, 77, 64).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(global_batch(1000, 5, 77, 64).tolist())


def test_orders_are_uniform_and_independent() -> None:
    """All 24 orders of 4 items are equally likely over epochs and over seeds; neighbouring epochs are independent."""
    for draws in (
        [tuple(permutation(4, 0, epoch)) for epoch in range(4800)],
        [tuple(permutation(4, seed, 0)) for seed in range(4800)],
    ):
        _, counts = np.unique(draws, axis=0, return_counts=True)
        assert len(counts) == 24
        assert stats.chisquare(counts).pvalue > 1e-4
        firsts = np.array(draws)[:, 0]
        table = np.histogram2d(firsts[:-1], firsts[1:], bins=4)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4


def test_flips_are_fair_and_independent_of_the_order() -> None:
    drawn = np.stack([flips(1, step, np.arange(64)) for step in range(500)])
    assert stats.binomtest(int(drawn.sum()), drawn.size).pvalue > 1e-4
    assert stats.chi2_contingency(np.histogram2d(drawn[:-1].ravel(), drawn[1:].ravel(), bins=2)[0]).pvalue > 1e-4


def test_seeds_and_steps_do_not_run_into_each_other() -> None:
    keys = [(0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (2**32, 1), (1, 2**32)]
    orders = {tuple(permutation(64, seed, epoch)) for seed, epoch in keys}
    assert len(orders) == len(keys)


@pytest.mark.parametrize("arguments", [(0, 0, 0, 1), (1, 0, 0, 0), (1, 0, -1, 1), (1, -1, 0, 1), (1, 2**63, 0, 1)])
def test_impossible_values(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(TcmError):
        global_batch(*arguments)


def test_impossible_shares() -> None:
    with pytest.raises(TcmError, match="use a multiple of 4"):
        rank_indices(10, 0, 4)
    with pytest.raises(TcmError, match="use 0 to 3"):
        rank_indices(8, 4, 4)
