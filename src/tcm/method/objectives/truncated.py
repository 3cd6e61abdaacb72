"""Truncated consistency training. TCM Eq. 6–11, Algorithm 1: stage 2."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Self

import torch
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.curriculum import Curriculum
from tcm.method.distances import Distance
from tcm.method.objectives.base import Batch, Draw, Losses, Models, Objective, check_label_dropout, draw
from tcm.method.objectives.consistency import Pairs
from tcm.method.times import TimeDistribution


@dataclass(frozen=True)
class TruncatedConsistency(Objective):
    """L_TCM = w_b L_B(f_θ, f_θ0⁻) + L_C(f_θ, f_θ⁻). TCM Eq. 8–11: stage 2.

    N_B = ⌊Bρ⌋ samples sit at t = t' exactly, where the frozen stage-1 model gives the target; the others at t ~ ψ̄_t.
    """

    times: TimeDistribution
    pairs: Pairs = Pairs(Curriculum(d=0))
    t_prime: float = 1.0
    w_b: float = 0.1
    rho: float = 0.25
    label_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_label_dropout(self.label_dropout)
        if not 0 < self.rho < 1:
            raise TcmError(f"rho={self.rho} must lie between 0 and 1: it is the boundary samples' share of the batch")
        if not self.w_b >= 0:
            raise TcmError(f"w_b={self.w_b:g}, the weight of the boundary loss, must be at least 0")
        low, _ = self.times.span
        if low < self.t_prime:
            raise TcmError(f"times.low={low:g} is below t_prime={self.t_prime:g}; use low={self.t_prime:g}")

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        return self.loss_at(models, batch, step, self.draw(models, batch, step, streams))

    def draw(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Draw:
        """t = t' for the boundary samples, t ~ ψ̄_t for the others. TCM Eq. 7."""
        drawn = draw(self.times.at(step), models, batch, streams, self.label_dropout)
        return replace(drawn, t=torch.where(self.is_boundary(batch), self.t_prime, drawn.t))

    def loss_at(self, models: Models, batch: Batch, step: int, drawn: Draw) -> Losses:
        """The loss at given times and noise. TCM Eq. 11."""
        weighted = self.pairs.weighted_distances(models, batch, step, drawn, self.t_prime)
        N_B = self.boundary_count(batch.B)
        boundary = to_device(self.is_boundary(batch), weighted.device)
        L_B = (weighted * boundary).sum() / N_B
        L_C = (weighted * ~boundary).sum() / (batch.B - N_B)
        parts = {"consistency": L_C.detach(), "boundary": L_B.detach()}
        return Losses(self.w_b * L_B + L_C, parts, weighted.detach(), drawn.t)

    def boundary_count(self, B: int) -> int:
        """N_B = ⌊Bρ⌋; a batch without boundary samples would silently collapse, so it is an error."""
        N_B = floor(B * self.rho + 1e-9)
        if not 0 < N_B < B:
            raise TcmError(
                f"rho={self.rho} of a batch of {B} gives {N_B} boundary samples, but a batch needs at least one of "
                f"them and one other; use a batch of at least {max(2, ceil(1 / self.rho - 1e-9))} or another rho"
            )
        return N_B

    def is_boundary(self, batch: Batch) -> Tensor:
        """Which of these samples are boundary samples: the first N_B of the global batch. TCM Algorithm 1."""
        return batch.index < self.boundary_count(batch.B)

    def schedule(self, step: int) -> dict[str, float]:
        return self.pairs.curriculum.schedule(step)

    def comparing_by(self, change: Callable[[Distance], Distance]) -> Self:
        """The objective with its pairs' distance changed."""
        return replace(self, pairs=replace(self.pairs, distance=change(self.pairs.distance)))
