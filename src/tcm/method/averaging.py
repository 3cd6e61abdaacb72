"""Averages of the weights over the course of training: constant and power-function EMA. TCM App. F; EDM2 Sec. 3."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tcm.foundation.errors import TcmError


class Decay(ABC):
    """β_i, how much of itself an average keeps at iteration i; a frozen dataclass."""

    @abstractmethod
    def beta(self, iteration: int) -> float:
        """β at iteration i = 1, 2, …."""


@dataclass(frozen=True)
class ConstantDecay(Decay):
    """β_i = decay."""

    decay: float = 0.9999
    kind: Literal["constant"] = "constant"

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise TcmError(f"decay={self.decay:g} must be at least 0 and below 1")

    def beta(self, iteration: int) -> float:
        return self.decay


@dataclass(frozen=True)
class PowerDecay(Decay):
    """β_i = (1 − 1/i)^(γ + 1): the average forgets in proportion to the training's length.

    >>> PowerDecay(6.94).beta(1)
    0.0
    """

    gamma: float = 6.94
    kind: Literal["power"] = "power"

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise TcmError(f"gamma={self.gamma:g} must be above 0; 6.94 is a relative width of 0.10")

    def beta(self, iteration: int) -> float:
        return (1 - 1 / iteration) ** (self.gamma + 1)


@torch.no_grad()
def follow(follower: nn.Module, module: nn.Module, beta: float) -> None:
    """θ̄ ← β θ̄ + (1 − β) θ for a module that is an average of another."""
    torch._foreach_lerp_(list(follower.parameters()), list(module.parameters()), 1 - beta)


class Average:
    """θ̄ ← β_i θ̄ + (1 − β_i) θ over parameters; the buffers of a module's state are copied."""

    def __init__(self, module: nn.Module, decay: Decay) -> None:
        self.decay = decay
        # What does not move is its own average: no second copy of it.
        self._fixed = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        self._state = {name: tensor if name in self._fixed else tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def update(self, module: nn.Module, iteration: int) -> None:
        """Take in the weights after iteration i = 1, 2, …."""
        current = module.state_dict()
        averaged = [name for name, _ in module.named_parameters() if name not in self._fixed]
        means, weights = [self._state[name] for name in averaged], [current[name] for name in averaged]
        torch._foreach_lerp_(means, weights, 1 - self.decay.beta(iteration))
        for name in current.keys() - self._fixed - set(averaged):
            self._state[name].copy_(current[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights under the module's own names: what the module's `load_state_dict` takes."""
        return dict(self._state)

    def own_state(self) -> dict[str, Tensor]:
        """Those of them that are not the module's own tensors: what a checkpoint needs."""
        return {name: tensor for name, tensor in self._state.items() if name not in self._fixed}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Resume from averaged weights."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])
