"""Δ_t, the distance between the two times of a pair, and how it tightens. TCM App. F."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Self

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError

SMALLEST_R = 1e-6
"""r never falls below this, so that ln r stays finite."""


@dataclass(frozen=True)
class Spacing(ABC):
    """How far apart the times t and r = t − Δ_t of a pair are. A frozen dataclass; in recipes its `kind` names it."""

    @abstractmethod
    def delta(self, t: Tensor, step: int) -> Tensor:
        """Δ_t in (0, t), for times t (float64, on the CPU)."""

    def within(self, low: float, high: float) -> Self:
        """The same spacing for times in [low, high]; one that does not depend on the range is itself."""
        return self

    def earliest(self, t: float) -> float:
        """The lowest r = t − Δ_t of any step; by default that of the first.

        >>> Curriculum(d=0, limit=0.9, k=0.0).earliest(1.0)
        0.9
        """
        t_ = torch.tensor(t, dtype=torch.float64)
        return float(t_ - self.delta(t_, step=0))

    @property
    def length(self) -> int:
        """The first step from which Δ_t no longer changes."""
        return 0

    def schedule(self, step: int) -> dict[str, float]:
        """What changes over the steps, by name: for metrics and figures."""
        return {}


@dataclass(frozen=True)
class Curriculum(Spacing):
    """ratio(i) = min(1 − 1/q^⌈i/d⌉, limit) at iteration i = 1, 2, …; Δ_t = t (1 − ratio) (1 + k sigmoid(−t)).

    The paper prints max where a cap is meant. A stage that holds the limit from its first step has d = 0.

    >>> cifar10 = Curriculum(q=2, d=25_000, limit=0.999)
    >>> cifar10.ratio(0), cifar10.ratio(25_000), cifar10.ratio(10**6)
    (0.5, 0.75, 0.999)
    >>> Curriculum(q=2, d=0, limit=0.999).ratio(0)
    0.999
    """

    q: float = 2.0
    d: int = 25_000
    limit: float = 0.999
    k: float = 8.0
    kind: Literal["ratio"] = field(default="ratio", repr=False)

    def __post_init__(self) -> None:
        if not (self.q > 1 and self.d >= 0 and 0 < self.limit < 1 and self.k >= 0):
            raise TcmError(f"{self} does not keep Δ_t above 0; use q > 1, d ≥ 0, 0 < limit < 1 and k ≥ 0")

    def ratio(self, step: int) -> float:
        """The ratio of a step; steps count from 0, the paper's iterations i = step + 1 from 1."""
        doublings = step // self.d + 1 if self.d else inf
        return min(1 - self.q**-doublings, self.limit)

    @property
    def length(self) -> int:
        """The first step at the limit.

        >>> Curriculum(q=2, d=25_000, limit=0.999).length, Curriculum(d=0).length
        (225000, 0)
        """
        tightened = range(2**62)  # how often; any q > 1 has reached any limit < 1 before
        return self.d * bisect_left(tightened, True, key=lambda times: self.ratio(times * self.d) == self.limit)

    def schedule(self, step: int) -> dict[str, float]:
        """The ratio r/t of a pair's times, for large t."""
        return {"ratio": self.ratio(step)}

    def delta(self, t: Tensor, step: int) -> Tensor:
        """Δ_t in (0, t): so that r = t − Δ_t stays above 1e-6."""
        delta = t * (1 - self.ratio(step)) * (1 + self.k * torch.sigmoid(-t))
        return torch.minimum(delta, t - SMALLEST_R)
