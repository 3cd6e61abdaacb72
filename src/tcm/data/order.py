"""Which images a step sees: pure functions of (seed, step), so that no restart, worker or process changes anything.

The random bits are raw Philox output seeded through SeedSequence: both are frozen by numpy's compatibility policy, so a
run's order also survives an upgrade of numpy (which `Generator.permutation` would not promise).
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tcm.foundation.errors import TcmError

_ORDER, _FLIPS = 0, 1


def global_batch(count: int, seed: int, step: int, batch: int) -> NDArray[np.int64]:
    """Return the indices of step `step`'s whole batch: items step·batch to (step+1)·batch of the endless sequence.

    Each epoch is a permutation of all images that depends on (seed, epoch) alone; a batch may straddle epochs, and
    nothing is replayed to reach a late step.

    >>> global_batch(count=4, seed=0, step=10_000_000, batch=4).shape
    (4,)
    """
    check_seed(seed)
    if count < 1 or batch < 1 or step < 0:
        raise TcmError(f"count={count} and batch={batch} must be at least 1, step={step} at least 0")
    start, end = step * batch, (step + 1) * batch
    parts = []
    while start < end:
        epoch, offset = divmod(start, count)
        taken = min(count - offset, end - start)
        parts.append(permutation(count, seed, epoch)[offset : offset + taken])
        start += taken
    return np.concatenate(parts)


def check_seed(seed: int) -> None:
    """Refuse a seed that is negative or longer than 63 bits."""
    if not 0 <= seed < 2**63:
        raise TcmError(f"seed={seed} is out of range; use 0 to 2^63 - 1")


@lru_cache(maxsize=4)
def permutation(count: int, seed: int, epoch: int, window: int = 0) -> NDArray[np.int64]:
    """Return the order of `count` items in an epoch (or a window of it), read-only: that of random 64-bit words."""
    order = np.argsort(_random_words(count, seed, epoch, _ORDER, window), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def rank_indices(batch: int, rank: int, world: int) -> NDArray[np.int64]:
    """Return the indices in the whole batch that process `rank` takes: rank, rank + world, rank + 2·world, ...

    >>> rank_indices(batch=6, rank=1, world=2)
    array([1, 3, 5])
    """
    if not 0 <= rank < world:
        raise TcmError(f"rank={rank} is not one of world={world} processes; use 0 to {world - 1}")
    if batch % world:
        raise TcmError(f"batch={batch} cannot be shared evenly by {world} processes; use a multiple of {world}")
    return np.arange(rank, batch, world, dtype=np.int64)


def flips(seed: int, step: int, index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return, for each index in step `step`'s whole batch, whether its image is mirrored (probability 1/2)."""
    last = int(index.max(initial=-1))
    return (_random_words(last + 1, seed, step, _FLIPS) >> np.uint64(63)).astype(np.bool_)[index]


def _random_words(count: int, *key: int) -> NDArray[np.uint64]:
    # Words of fixed width: SeedSequence would run a large number into its neighbour.
    words = np.array(key, dtype="<u8").view("<u4")
    return np.random.Philox(np.random.SeedSequence(words.tolist())).random_raw(count)
