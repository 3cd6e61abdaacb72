"""Averages of the weights over the course of training: constant and power-function EMA. TCM App. E; EDM2 Sec. 3."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ConstantDecay:
    """β_i = decay."""

    decay: float = 0.9999

    def beta(self, iteration: int) -> float:
        """β at iteration i = 1, 2, …."""
        return self.decay


@dataclass(frozen=True)
class PowerDecay:
    """β_i = (1 − 1/i)^(γ + 1): the average forgets in proportion to the training's length.

    >>> PowerDecay(6.94).beta(1)
    0.0
    """

    gamma: float = 6.94

    def beta(self, iteration: int) -> float:
        """β at iteration i = 1, 2, …."""
        return (1 - 1 / iteration) ** (self.gamma + 1)


Decay = ConstantDecay | PowerDecay


class Average:
    """θ̄ ← β_i θ̄ + (1 − β_i) θ over parameters; buffers are copied."""

    def __init__(self, module: nn.Module, decay: Decay) -> None:
        self.decay = decay
        self._parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        self._buffers = {name: b.detach().clone() for name, b in module.named_buffers()}

    @torch.no_grad()
    def update(self, module: nn.Module, iteration: int) -> None:
        """Take in the weights after iteration i = 1, 2, …."""
        current = [p.detach() for p in module.parameters()]
        torch._foreach_lerp_(list(self._parameters.values()), current, 1 - self.decay.beta(iteration))
        for mean, buffer in zip(self._buffers.values(), module.buffers(), strict=True):
            mean.copy_(buffer)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights under the module's own names."""
        return self._parameters | self._buffers

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from averaged weights."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])
