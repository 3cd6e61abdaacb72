"""What each stage minimises: diffusion, consistency, truncated consistency. TCM Eq. 4–11, Algorithm 1.

Every objective has one signature, `loss(models, batch, step, streams)`, and keeps drawing (t, ε, masks) apart from
computing with what was drawn, `loss_at(models, batch, step, draw)`.
"""

from dataclasses import dataclass
from math import ceil, floor
from typing import Protocol

import torch
from torch import Tensor

from tcm.devices import to_device
from tcm.errors import TcmError
from tcm.method.curriculum import Curriculum
from tcm.method.distances import Distance, PseudoHuber, Weighting, inverse_delta
from tcm.method.preconditioning import Denoiser, Masks, c_noise, c_out, column
from tcm.method.solvers import Step, guided, heun
from tcm.method.streams import SampleStreams
from tcm.method.times import LogNormal, TimeDistribution


@dataclass(frozen=True)
class Models:
    """f_θ, the frozen f_θ0⁻ of the stage before, and the diffusion model D to distil from."""

    student: Denoiser
    frozen: Denoiser | None = None
    teacher: Denoiser | None = None


@dataclass(frozen=True)
class Batch:
    """Images x in [−1, 1]: all of the global batch of B samples, or the share at these `places` of it."""

    x: Tensor
    labels: Tensor | None
    places: Tensor
    B: int

    @staticmethod
    def whole(x: Tensor, labels: Tensor | None = None) -> "Batch":
        """A batch that is not shared with other processes or micro-batches."""
        return Batch(x, labels, torch.arange(len(x)), len(x))


@dataclass(frozen=True)
class Draw:
    """What is random in a step: times t (float64, CPU), noise ε, dropout masks, and labels as seen by the network."""

    t: Tensor
    eps: Tensor
    masks: Masks | None
    labels: Tensor | None


@dataclass(frozen=True)
class Losses:
    """`total` and its named parts are this share's terms of the global batch's loss: over all shares they add up to it.

    `weighted` is the weighted loss of each sample, at its time `t`.
    """

    total: Tensor
    parts: dict[str, Tensor]
    weighted: Tensor
    t: Tensor


class Objective(Protocol):
    """What a trainer needs to know of a stage's objective."""

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Losses:
        """Draw and compute."""
        ...


@dataclass(frozen=True)
class Diffusion:
    """E λ(t) ‖f_θ(x + tε, t) − x‖²/d with λ = 1/c_out²: EDM's loss.

    A student with a learned uncertainty u(t) minimises λ ‖·‖²/(d e^u) + u instead: EDM2's loss.
    """

    times: TimeDistribution = LogNormal(-1.2, 1.2)
    label_dropout: float = 0.0

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Losses:
        """Draw and compute."""
        return self.loss_at(models, batch, step, self.draw(models, batch, streams))

    def draw(self, models: Models, batch: Batch, streams: SampleStreams) -> Draw:
        """t ~ ψ_t, ε ~ N(0, I), masks; labels fall away with probability `label_dropout`, for guidance."""
        draw = _draw(self.times, models, batch, streams)
        if batch.labels is None or self.label_dropout == 0:
            return draw
        kept = to_device(streams.uniform() >= self.label_dropout, batch.labels.device)
        return Draw(draw.t, draw.eps, draw.masks, torch.where(kept, batch.labels, -1))

    def loss_at(self, models: Models, batch: Batch, step: int, draw: Draw) -> Losses:
        """The loss at given times and noise."""
        f = models.student
        x_t = batch.x + column(draw.t, batch.x) * draw.eps
        error = (f(x_t, draw.t, draw.labels, draw.masks) - batch.x).flatten(1).square().mean(1)
        weighted = error / to_device(c_out(draw.t, f.sigma_data).to(error.dtype), error.device) ** 2
        denoising = weighted.detach().sum() / batch.B
        if f.uncertainty is not None:
            u = f.uncertainty(to_device(c_noise(draw.t).to(error.dtype), error.device))
            weighted = weighted / u.exp() + u
        return Losses(weighted.sum() / batch.B, {"denoising": denoising}, weighted.detach(), draw.t)


@dataclass(frozen=True)
class Distillation:
    """x_r by one step of a solver with the teacher's D instead of x + rε, with guidance at a fixed scale."""

    step: Step = heun
    guidance: float = 1.0


@dataclass(frozen=True)
class Pairs:
    """How two neighbouring points of a trajectory are made and compared: all of Eq. 4 but ψ_t."""

    curriculum: Curriculum = Curriculum()
    distance: Distance = PseudoHuber(1e-8)
    weighting: Weighting = inverse_delta
    distillation: Distillation | None = None

    def earlier(self, models: Models, batch: Batch, draw: Draw, x_t: Tensor, r: Tensor) -> Tensor:
        """x_r: x + rε in consistency training, one solver step from x_t in consistency distillation."""
        if self.distillation is None:
            return batch.x + column(r, batch.x) * draw.eps
        if models.teacher is None:
            raise TcmError(
                "distillation needs a teacher, and models.teacher is None; pass the diffusion model as teacher"
            )
        denoise = guided(models.teacher, draw.labels, self.distillation.guidance)
        return self.distillation.step(denoise, x_t, draw.t, r)

    def weighted_distances(self, models: Models, batch: Batch, step: int, draw: Draw, t_prime: float) -> Tensor:
        """ω(t)/Δ_t d(f_θ(x_t, t), f_{θ⁻,θ0⁻}^trunc(x_r, r)) of each sample. TCM Eq. 4 and 5."""
        t, delta = draw.t, self.curriculum.delta(draw.t, step)
        r = t - delta
        x_t = batch.x + column(t, batch.x) * draw.eps
        with torch.no_grad():
            x_r = self.earlier(models, batch, draw, x_t, r)
            target = f_trunc(models, x_r, r, draw, t_prime)
        weight = self.weighting(t, delta, models.student.sigma_data).to(batch.x.dtype)
        return to_device(weight, batch.x.device) * self.distance(
            models.student(x_t, t, draw.labels, draw.masks), target
        )


def f_trunc(models: Models, x: Tensor, t: Tensor, draw: Draw, t_prime: float) -> Tensor:
    """f_{θ,θ0⁻}^trunc(x, t) = f_θ(x, t) 1{t ≥ t'} + f_θ0⁻(x, t) 1{t < t'}. TCM Eq. 5.

    Each sample goes through one network only, with its own dropout masks. A network is called even for no sample:
    where its weights are shared among processes, each of them has to take part.
    """
    early = t < t_prime
    out = torch.empty_like(x)
    for f, rows in ((models.frozen, early.nonzero()[:, 0]), (models.student, (~early).nonzero()[:, 0])):
        if f is None:
            if len(rows):
                raise TcmError(f"t_prime={t_prime} needs the stage-1 model, and models.frozen is None; pass it")
            continue
        here = to_device(rows, x.device)
        labels = None if draw.labels is None else draw.labels[here]
        masks = None if draw.masks is None else [mask[here] for mask in draw.masks]
        out[here] = f(x[here], t[rows], labels, masks)
    return out


@dataclass(frozen=True)
class Consistency:
    """L_CT = E ω(t)/Δ_t d(f_θ(x_t, t), f_θ⁻(x_r, r)), r = t − Δ_t. TCM Eq. 4: stage 1."""

    times: TimeDistribution = LogNormal(-1.1, 2.0)
    pairs: Pairs = Pairs()

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Losses:
        """Draw and compute."""
        return self.loss_at(models, batch, step, self.draw(models, batch, streams))

    def draw(self, models: Models, batch: Batch, streams: SampleStreams) -> Draw:
        """t ~ ψ_t, ε ~ N(0, I), masks."""
        return _draw(self.times, models, batch, streams)

    def loss_at(self, models: Models, batch: Batch, step: int, draw: Draw) -> Losses:
        """The loss at given times and noise."""
        weighted = self.pairs.weighted_distances(models, batch, step, draw, t_prime=0.0)
        total = weighted.sum() / batch.B
        return Losses(total, {"consistency": total.detach()}, weighted.detach(), draw.t)


@dataclass(frozen=True)
class TruncatedConsistency:
    """L_TCM = w_b L_B(f_θ, f_θ0⁻) + L_C(f_θ, f_θ⁻). TCM Eq. 8–11: stage 2.

    N_B = ⌊Bρ⌋ samples sit at t = t' exactly, where the frozen stage-1 model gives the target; the others at t ~ ψ̄_t.
    """

    times: TimeDistribution
    pairs: Pairs = Pairs(Curriculum(d=0))
    t_prime: float = 1.0
    w_b: float = 0.1
    rho: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise TcmError(f"rho={self.rho} must lie between 0 and 1: it is the boundary samples' share of the batch")
        if self.times.low < self.t_prime:
            raise TcmError(f"times.low={self.times.low} lies below t_prime={self.t_prime}; use low={self.t_prime}")

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Losses:
        """Draw and compute."""
        return self.loss_at(models, batch, step, self.draw(models, batch, streams))

    def draw(self, models: Models, batch: Batch, streams: SampleStreams) -> Draw:
        """t = t' for the boundary samples, t ~ ψ̄_t for the others. TCM Eq. 7."""
        draw = _draw(self.times, models, batch, streams)
        t = torch.where(self.is_boundary(batch), self.t_prime, draw.t)
        return Draw(t, draw.eps, draw.masks, draw.labels)

    def loss_at(self, models: Models, batch: Batch, step: int, draw: Draw) -> Losses:
        """The loss at given times and noise. TCM Eq. 11."""
        weighted = self.pairs.weighted_distances(models, batch, step, draw, self.t_prime)
        N_B = self.boundary_count(batch.B)
        boundary = to_device(self.is_boundary(batch), weighted.device)
        L_B = (weighted * boundary).sum() / N_B
        L_C = (weighted * ~boundary).sum() / (batch.B - N_B)
        parts = {"consistency": L_C.detach(), "boundary": L_B.detach()}
        return Losses(self.w_b * L_B + L_C, parts, weighted.detach(), draw.t)

    def boundary_count(self, B: int) -> int:
        """N_B = ⌊Bρ⌋; a batch without boundary samples would collapse in silence, so it is an error."""
        N_B = floor(B * self.rho + 1e-9)
        if not 0 < N_B < B:
            raise TcmError(
                f"rho={self.rho} of a batch of {B} gives {N_B} boundary samples, and there must be at least one of "
                f"each kind; use a batch of at least {max(2, ceil(1 / self.rho - 1e-9))} or another rho"
            )
        return N_B

    def is_boundary(self, batch: Batch) -> Tensor:
        """Which of these samples are boundary samples: the first N_B of the global batch. TCM Algorithm 1."""
        return batch.places < self.boundary_count(batch.B)


def _draw(times: TimeDistribution, models: Models, batch: Batch, streams: SampleStreams) -> Draw:
    t = times.quantile(streams.uniform())
    eps = streams.normal(batch.x.shape[1:])
    return Draw(t, eps, models.student.network.draw_masks(streams), batch.labels)
