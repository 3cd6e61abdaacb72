"""ψ̄_t: how training times are drawn. TCM Eq. 7, Sec. 4.4, App. F."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, log, pi
from typing import Literal, Self

import numpy as np
import torch
from scipy.special import gammaln, ndtr, stdtr
from torch import Tensor

from tcm.foundation.errors import TcmError

GRID_POINTS = 2**15
FARTHEST = 1e150
"""Deviations from the mean beyond this are taken for this: its square is still finite."""


@dataclass(frozen=True)
class TimeDistribution(ABC):
    """How training times are drawn, continuous or on a grid. A frozen dataclass; in recipes its `kind` names it."""

    @property
    @abstractmethod
    def span(self) -> tuple[float, float]:
        """[low, high], which hold all times."""

    @abstractmethod
    def within(self, low: float, high: float) -> Self:
        """The same distribution on [low, high], unless it has its own bounds."""

    def at(self, step: int) -> TimeDistribution:
        """The distribution at a step of training; one that does not change is itself."""
        return self

    def in_units_of(self, unit: float) -> Self:
        """The distribution of unit · t, but for bounds that it has; one that has no such scale stays as it is."""
        return self

    @abstractmethod
    def quantile(self, u: Tensor) -> Tensor:
        """The t below which the fraction u of all draws lies (float64, on the CPU)."""

    @abstractmethod
    def density(self, t: Tensor) -> Tensor:
        """ψ̄_t(t), zero outside [low, high], for figures; on a grid, each probability spread over its interval."""

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """`count` independent times drawn from `generator`, whatever its device.

        >>> t = LogNormal(-1.1, 2.0).sample(1000, torch.Generator().manual_seed(0))
        >>> bool(((t >= 0.002) & (t <= 80)).all())
        True
        """
        return self.quantile(torch.rand(count, generator=generator, device=generator.device))


@dataclass(frozen=True)
class LogTimes(TimeDistribution):
    """ln t = mean + std z for a symmetric z, truncated to t in [low, high]; unset, these are EDM's 0.002 and 80."""

    mean: float
    std: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        low, high = self.span
        if not (0 < low < high < inf):
            raise TcmError(f"times from low={low:g} to high={high:g} are not a valid range; use 0 < low < high")
        if not self.std > 0:
            raise TcmError(f"std={self.std:g} of ln t must be above 0")

    @property
    def span(self) -> tuple[float, float]:
        return 0.002 if self.low is None else self.low, 80.0 if self.high is None else self.high

    def within(self, low: float, high: float) -> Self:
        return replace(self, low=low if self.low is None else self.low, high=high if self.high is None else self.high)

    def in_units_of(self, unit: float) -> Self:
        return replace(self, mean=self.mean + log(unit))

    @abstractmethod
    def cdf(self, z: np.ndarray) -> np.ndarray:
        """P(Z < z)."""

    @abstractmethod
    def pdf(self, z: np.ndarray) -> np.ndarray:
        """The density of z."""

    def quantile(self, u: Tensor) -> Tensor:
        cumulative, ln_t = _table(self)
        u = u.detach().to("cpu", torch.float64)
        upper = torch.searchsorted(cumulative, u, right=True).clamp(1, GRID_POINTS - 1)
        below, above = cumulative[upper - 1], cumulative[upper]
        fraction = ((u - below) / (above - below).clamp_min(torch.finfo(u.dtype).tiny)).clamp(0, 1)
        return torch.lerp(ln_t[upper - 1], ln_t[upper], fraction).exp().clamp(*self.span)

    def density(self, t: Tensor) -> Tensor:
        low, high = self.span
        inside = (t >= low) & (t <= high)
        t = torch.where(inside, t.double(), low)
        mass = _interval_masses(self, self.deviations(np.log([low, high])))[0]
        return torch.from_numpy(self.pdf(self.deviations(t.log().numpy())) / (mass * self.std)) / t * inside

    def deviations(self, ln_t: np.ndarray) -> np.ndarray:
        """z = (ln t − mean) / std."""
        farthest = FARTHEST * self.std
        return np.clip(ln_t - self.mean, -farthest, farthest) / self.std


@dataclass(frozen=True)
class LogNormal(LogTimes):
    """ln t ~ N(mean, std²): stage 1, and the diffusion model's training."""

    kind: Literal["lognormal"] = "lognormal"

    def cdf(self, z: np.ndarray) -> np.ndarray:
        return ndtr(z)

    def pdf(self, z: np.ndarray) -> np.ndarray:
        return np.exp(-(z**2) / 2) / np.sqrt(2 * pi)


@dataclass(frozen=True)
class LogStudentT(LogTimes):
    """ln t = mean + std z with z ~ Student-t(ν): stage 2. A small ν is nearly uniform in ln t."""

    nu: float = 0.01
    kind: Literal["logstudentt"] = "logstudentt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nu > 0:
            raise TcmError(f"nu={self.nu:g} must be above 0")

    def cdf(self, z: np.ndarray) -> np.ndarray:
        return stdtr(self.nu, z)

    def pdf(self, z: np.ndarray) -> np.ndarray:
        half = (self.nu + 1) / 2
        return np.exp(gammaln(half) - gammaln(self.nu / 2) - half * np.log1p(z**2 / self.nu)) / np.sqrt(self.nu * pi)


def _interval_masses(times: LogTimes, z: np.ndarray) -> np.ndarray:
    """P(z_i < Z < z_{i+1}), exact in both tails: above the centre P(Z < −z) is subtracted, below it P(Z < z)."""
    return np.where(z[:-1] > 0, -np.diff(times.cdf(-z)), np.diff(times.cdf(z)))


@lru_cache(maxsize=64)
def _table(distribution: LogTimes) -> tuple[Tensor, Tensor]:
    """The cumulative distribution on a grid of ln t: scipy is asked once, not at each step."""
    low, high = distribution.span
    ln_t = np.linspace(log(low), log(high), GRID_POINTS)
    masses = _interval_masses(distribution, distribution.deviations(ln_t))
    cumulative = np.concatenate([[0.0], np.cumsum(masses)])
    if not cumulative[-1] > 0:
        raise TcmError(f"{distribution} has no probability between low and high; move its mean towards them")
    return torch.from_numpy(cumulative / cumulative[-1]), torch.from_numpy(ln_t)
