"""Random numbers that belong to a sample, not to a process, a batch or a device's history."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import tau

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcm.foundation.devices import to_device


def derive_seed(*parts: int | str) -> int:
    """A 128-bit seed that is a pure function of `parts`, such as (seed, stage, step, index in the batch).

    >>> derive_seed(0, "stage", 7) == derive_seed(0, "stage", 7) != derive_seed(0, "stage", 8)
    True
    """
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=16).digest(), "little")


class SampleStreams:
    """One stream of random numbers per sample; sample i draws the same numbers in any batch and on any device.

    A stream is the counter-based generator Philox: its key is the sample's seed, all 128 bits of it, and each draw has
    its own range of counters. The numbers are made on the CPU from raw words, whose values numpy guarantees.

    >>> both, second = SampleStreams([3, 5]), SampleStreams([5])
    >>> bool((both.normal((2, 2))[1] == second.normal((2, 2))[0]).all())
    True
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._seeds = [seed % 2**128 for seed in seeds]
        self._draws = 0

    def __len__(self) -> int:
        return len(self._seeds)

    def uniform(self) -> Tensor:
        """One number in [0, 1) per sample (float64, on the CPU)."""
        return torch.from_numpy((self._words(1)[:, 0] >> np.uint64(11)) * 2.0**-53)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """A standard normal tensor of the given shape per sample."""
        count = torch.Size(shape).numel()
        halves = torch.from_numpy(self._words(-(-count // 2)).view(np.uint32).astype(np.float64))
        # Box–Muller in float64: the last bit of a CPU's logarithm is then lost in the rounding to float32.
        radius = ((halves[:, 0::2] + 0.5) / 2**32).log().mul(-2).sqrt()
        angle = halves[:, 1::2] * (tau / 2**32)
        pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2)
        return to_device(pairs.flatten(1)[:, :count].float().view(len(self), *shape), self.device)

    def bernoulli(self, shape: Sequence[int], probability: float) -> Tensor:
        """A boolean tensor of the given shape per sample, true with `probability` (to 1 in 65,536).

        Made on the device, by its own generator: there are too many of them to copy.
        """
        count = torch.Size(shape).numel()
        words = torch.empty((len(self), -(-count // 4)), dtype=torch.int64, device=self.device)
        for row, seed in zip(words, self._seeds, strict=True):
            generator = torch.Generator(self.device).manual_seed(derive_seed(seed, self._draws) % 2**63)
            row.random_(-(2**63), None, generator=generator)
        self._draws += 1
        sixteenths = words.view(torch.int16)[:, :count]
        threshold = min(round(probability * 2**16), 2**16 - 1) - 2**15  # 2¹⁵ itself is not an int16
        return (sixteenths < threshold).view(len(self), *shape)

    def _words(self, count: int) -> NDArray[np.uint64]:
        """`count` random 64-bit words per sample: those of the streams' next draw."""
        words = np.empty((len(self), count), dtype=np.uint64)
        for row, philox in zip(words, self._generators(), strict=True):
            row[:] = philox.random_raw(count)
        self._draws += 1
        return words

    def _generators(self) -> Iterator[np.random.Philox]:
        """Philox at the start of each sample's next draw: one object, as making one takes longer than using it."""
        philox = np.random.Philox(key=0)
        state = philox.state
        counter = np.array([0, 0, 0, self._draws], dtype=np.uint64)
        for seed in self._seeds:
            key = np.array([seed % 2**64, seed >> 64], dtype=np.uint64)
            state["state"] = {"counter": counter, "key": key}
            philox.state = state
            yield philox
