"""Denoising: EDM's and EDM2's loss, which stage 0 minimises."""

from dataclasses import dataclass

from tcm.foundation.devices import to_device
from tcm.foundation.randomness import SampleStreams
from tcm.method.objectives.base import Batch, Draw, Losses, Models, Objective, check_label_dropout, draw
from tcm.method.preconditioning import c_out, column
from tcm.method.times import LogNormal, TimeDistribution


@dataclass(frozen=True)
class Diffusion(Objective):
    """E λ(t) ‖f_θ(x + tε, t) − x‖²/d with λ = 1/c_out²: EDM's loss.

    A student with a learned uncertainty u(t) minimises λ ‖·‖²/(d e^u) + u instead: EDM2's loss.
    """

    times: TimeDistribution = LogNormal(-1.2, 1.2)
    label_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_label_dropout(self.label_dropout)

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        return self.loss_at(models, batch, step, self.draw(models, batch, step, streams))

    def draw(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Draw:
        """t ~ ψ_t, ε ~ N(0, I), masks; the condition is dropped with probability `label_dropout`, for guidance."""
        return draw(self.times.at(step), models, batch, streams, self.label_dropout)

    def loss_at(self, models: Models, batch: Batch, step: int, drawn: Draw) -> Losses:
        """The loss at given times and noise."""
        f = models["student"]
        x_t = batch.x + column(drawn.t, batch.x) * drawn.eps
        error = (f(x_t, drawn.t, drawn.condition, drawn.masks) - batch.x).flatten(1).square().mean(1)
        weighted = error / to_device(c_out(drawn.t, f.sigma_data).to(error.dtype), error.device) ** 2
        denoising = weighted.detach().sum() / batch.B
        if f.uncertainty is not None:
            u = f.uncertainty(to_device(f.preconditioning.c_noise(drawn.t, f.sigma_data).to(error.dtype), error.device))
            weighted = weighted / u.exp() + u
        return Losses(weighted.sum() / batch.B, {"denoising": denoising}, weighted.detach(), drawn.t)
