"""Randomness that belongs to a sample and not to a process, a batch or a device's history."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of `parts`, such as (seed, stage, step, place in the batch).

    >>> derive_seed(0, "stage", 7) == derive_seed(0, "stage", 7) != derive_seed(0, "stage", 8)
    True
    """
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class SampleStreams:
    """One stream of random numbers per sample; sample i draws the same numbers in any batch.

    >>> both, second = SampleStreams([3, 5]), SampleStreams([5])
    >>> bool((both.normal((2, 2))[1] == second.normal((2, 2))[0]).all())
    True
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]

    def __len__(self) -> int:
        return len(self._generators)

    def uniform(self) -> Tensor:
        """One number in [0, 1) per sample."""
        out = torch.empty(len(self), device=self.device)
        for row, generator in zip(out.unsqueeze(1), self._generators, strict=True):
            row.uniform_(generator=generator)
        return out

    def normal(self, shape: Sequence[int]) -> Tensor:
        """A standard normal tensor of the given shape per sample."""
        out = torch.empty((len(self), *shape), device=self.device)
        for row, generator in zip(out, self._generators, strict=True):
            row.normal_(generator=generator)
        return out

    def bernoulli(self, shape: Sequence[int], probability: float) -> Tensor:
        """A boolean tensor of the given shape per sample, true with `probability` (to 1 in 65,536)."""
        count = torch.Size(shape).numel()
        words = torch.empty((len(self), -(-count // 4)), dtype=torch.int64, device=self.device)
        for row, generator in zip(words, self._generators, strict=True):
            row.random_(-(2**63), None, generator=generator)
        sixteenths = words.view(torch.int16)[:, :count]
        threshold = min(round(probability * 2**16), 2**16 - 1) - 2**15  # 2¹⁵ itself is no int16
        return (sixteenths < threshold).view(len(self), *shape)
