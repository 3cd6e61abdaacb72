"""Consistency training and distillation. TCM Eq. 4 and 5: stage 1, and what stage 2 shares with it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.curriculum import Curriculum, Spacing
from tcm.method.distances import Distance, PseudoHuber, Weighting, inverse_delta
from tcm.method.objectives.base import Batch, Draw, Losses, Models, Objective, check_label_dropout, draw, model_of
from tcm.method.preconditioning import Denoiser, column
from tcm.method.solvers import Step, guided, heun
from tcm.method.times import LogNormal, TimeDistribution


@dataclass(frozen=True)
class Distillation:
    """x_r by one step of a solver with the teacher's D instead of x + rε, with guidance at a fixed scale."""

    step: Step = heun
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if not self.guidance >= 0:
            raise TcmError(f"guidance={self.guidance:g} must be at least 0; 1 means no guidance")


@dataclass(frozen=True)
class Pairs:
    """How two neighbouring points of a trajectory are made and compared: all of Eq. 4 but ψ_t."""

    curriculum: Spacing = Curriculum()
    distance: Distance = PseudoHuber(1e-8)
    weighting: Weighting = inverse_delta
    distillation: Distillation | None = None

    def earlier(self, models: Models, batch: Batch, drawn: Draw, x_t: Tensor, r: Tensor) -> Tensor:
        """x_r: x + rε in consistency training, one solver step from x_t in consistency distillation."""
        if self.distillation is None:
            return batch.x + column(r, batch.x) * drawn.eps
        D = model_of(models, "teacher", "distillation", drawn.t)
        return self.distillation.step(guided(D, drawn.condition, self.distillation.guidance), x_t, drawn.t, r)

    def weighted_distances(self, models: Models, batch: Batch, step: int, drawn: Draw, t_prime: float) -> Tensor:
        """ω(t)/Δ_t d(f_θ(x_t, t), f_{θ⁻,θ0⁻}^trunc(x_r, r)) of each sample. TCM Eq. 4 and 5."""
        f, t, delta = models["student"], drawn.t, self.curriculum.delta(drawn.t, step)
        r = t - delta
        x_t = batch.x + column(t, batch.x) * drawn.eps
        with torch.no_grad():
            x_r = self.earlier(models, batch, drawn, x_t, r)
            target = f_trunc(models, x_r, r, drawn, t_prime)
        return self.weight(f, t, delta, x_t) * self.distance(f(x_t, t, drawn.condition, drawn.masks), target)

    def weight(self, f: Denoiser, t: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        """ω(t)/Δ_t, for distances between images `like`."""
        return to_device(self.weighting(t, delta, f.sigma_data).to(like.dtype), like.device)


def f_trunc(models: Models, x: Tensor, t: Tensor, drawn: Draw, t_prime: float) -> Tensor:
    """f_{θ,θ0⁻}^trunc(x, t) = f_θ(x, t) 1{t ≥ t'} + f_θ0⁻(x, t) 1{t < t'}. TCM Eq. 5.

    Each sample goes through one network only, with its own dropout masks.
    """
    early = t < t_prime
    if bool(early.any()):
        model_of(models, "frozen", f"t_prime={t_prime:g}", t[early])
    out = torch.empty_like(x)
    for role, chosen in (("frozen", early), ("student", ~early)):
        if role in models:
            f = models[role]
            fill(out, chosen, partial(evaluated, f, x, t, drawn), f)
    return out


def evaluated(f: Denoiser, x: Tensor, t: Tensor, drawn: Draw, rows: Tensor) -> Tensor:
    """f(x, t) of some samples, under their condition and with their dropout masks."""
    some = drawn.select(rows)
    return f(x[to_device(rows, x.device)], t[rows], some.condition, some.masks)


def fill(out: Tensor, chosen: Tensor, evaluate: Callable[[Tensor], Tensor], f: Denoiser) -> None:
    """Write `evaluate(rows)`, which calls f, into the rows of `out` that are chosen.

    Without any such rows, f is called only if processes share its weights: for the first row, whose output is not used.
    """
    rows = chosen.nonzero()[:, 0]
    if len(rows):
        out[to_device(rows, out.device)] = evaluate(rows)
    elif f.weights_are_shared:
        evaluate(torch.zeros(1, dtype=torch.long))


@dataclass(frozen=True)
class Consistency(Objective):
    """L_CT = E ω(t)/Δ_t d(f_θ(x_t, t), f_θ⁻(x_r, r)), r = t − Δ_t. TCM Eq. 4: stage 1."""

    times: TimeDistribution = LogNormal(-1.1, 2.0)
    pairs: Pairs = Pairs()
    label_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_label_dropout(self.label_dropout)

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        return self.loss_at(models, batch, step, self.draw(models, batch, step, streams))

    def draw(self, models: Models, batch: Batch, step: int, streams: SampleStreams) -> Draw:
        """t ~ ψ_t, ε ~ N(0, I), masks; the condition is dropped with probability `label_dropout`."""
        return draw(self.times.at(step), models, batch, streams, self.label_dropout)

    def loss_at(self, models: Models, batch: Batch, step: int, drawn: Draw) -> Losses:
        """The loss at given times and noise."""
        weighted = self.pairs.weighted_distances(models, batch, step, drawn, t_prime=0.0)
        total = weighted.sum() / batch.B
        return Losses(total, {"consistency": total.detach()}, weighted.detach(), drawn.t)

    def schedule(self, step: int) -> dict[str, float]:
        return self.pairs.curriculum.schedule(step)

    def comparing_by(self, change: Callable[[Distance], Distance]) -> Self:
        """The objective with its pairs' distance changed."""
        return replace(self, pairs=replace(self.pairs, distance=change(self.pairs.distance)))
