"""d(x, y), the distance between two images, and ω(t)/Δ_t, the weight of a pair. TCM Eq. 4, App. F."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.method.preconditioning import c_out


@dataclass(frozen=True)
class Distance(ABC):
    """(x, y) ↦ d(x, y), one number per sample. A frozen dataclass; in recipes its `kind` names it."""

    @abstractmethod
    def __call__(self, x: Tensor, y: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PseudoHuber(Distance):
    """d(x, y) = √(‖x − y‖² + c²) − c, over all pixels of a sample.

    >>> PseudoHuber(0.06)(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).round(decimals=4)
    tensor([1.9409])
    """

    c: float
    kind: Literal["pseudo_huber"] = "pseudo_huber"

    def __post_init__(self) -> None:
        if not self.c > 0:
            raise TcmError(
                f"c={self.c} must be above 0, because at 0 equal images have no gradient; use a small value such as "
                "1e-8"
            )

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        # The same as √(‖·‖² + c²) − c, without its cancellation where the distance is far below c.
        squared = SquaredL2()(x, y)
        return squared / ((squared + self.c**2).sqrt() + self.c)


@dataclass(frozen=True)
class SquaredL2(Distance):
    """d(x, y) = ‖x − y‖²."""

    kind: Literal["squared_l2"] = "squared_l2"

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).flatten(1).square().sum(1)


Weighting = Callable[[Tensor, Tensor, float], Tensor]
"""(t, Δ_t, σ_data) ↦ ω(t)/Δ_t."""


def inverse_delta(t: Tensor, delta: Tensor, sigma_data: float) -> Tensor:
    """1/Δ_t, that is ω = 1: CIFAR-10."""
    return 1 / delta


def inverse_c_out_squared(t: Tensor, delta: Tensor, sigma_data: float) -> Tensor:
    """1/c_out(t)², that is ω = Δ_t/c_out²: ImageNet-64."""
    return 1 / c_out(t, sigma_data) ** 2


def uniform(t: Tensor, delta: Tensor, sigma_data: float) -> Tensor:
    """1, that is ω = Δ_t."""
    return torch.ones_like(t)


WeightingName = Literal["inverse_delta", "inverse_c_out_squared", "uniform"]
WEIGHTINGS: dict[WeightingName, Weighting] = {
    "inverse_delta": inverse_delta,
    "inverse_c_out_squared": inverse_c_out_squared,
    "uniform": uniform,
}


def general(omega: Callable[[Tensor], Tensor]) -> Weighting:
    """ω(t)/Δ_t for any ω.

    >>> general(lambda t: 1 / t)(torch.tensor([2.0]), torch.tensor([0.5]), 0.5)
    tensor([1.])
    """
    return lambda t, delta, sigma_data: omega(t) / delta
