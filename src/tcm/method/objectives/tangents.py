"""Consistency by the derivative along the trajectory instead of a difference: the limit of TCM Eq. 4 for Δ_t → 0."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.method.objectives.base import Batch, Draw, Models, model_of
from tcm.method.objectives.consistency import Pairs, evaluated, fill
from tcm.method.preconditioning import column
from tcm.method.solvers import guided, slope
from tcm.method.tangents import tangent


@dataclass(frozen=True)
class Tangents(Pairs):
    """Pairs whose earlier point is reached by the derivative: f(x_r, r) = f(x_t, t) − Δ_t df/dt + O(Δ_t²).

    Δ_t is left as a scale, so that distance, weighting and curriculum keep their meaning.
    """

    def weighted_distances(self, models: Models, batch: Batch, step: int, drawn: Draw, t_prime: float) -> Tensor:
        """ω(t)/Δ_t d(f_θ(x_t, t), target) of each sample. TCM Eq. 4 and 5 for Δ_t → 0.

        target = sg[f_θ(x_t, t) − Δ_t df_θ/dt] for t > t', and f_θ0⁻(x_t, t) for t ≤ t': of all samples with r < t', the
        limit leaves those at the boundary.
        """
        f, t, delta = models["student"], drawn.t, self.curriculum.delta(drawn.t, step)
        x_t = batch.x + column(t, batch.x) * drawn.eps
        early = t <= t_prime
        change, boundary = self._changes(models, drawn, x_t, delta, early), _boundary(models, drawn, x_t, early)
        f_t = f(x_t, t, drawn.condition, drawn.masks)
        target = torch.where(column(early, x_t).bool(), boundary, f_t.detach() - change)
        return self.weight(f, t, delta, x_t) * self.distance(f_t, target)

    def velocity(self, models: Models, drawn: Draw, x_t: Tensor) -> Tensor:
        """dx/dt: ε in consistency training, (x_t − D(x_t, t))/t in consistency distillation."""
        if self.distillation is None:
            return drawn.eps
        D = model_of(models, "teacher", "distillation", drawn.t)
        return slope(guided(D, drawn.condition, self.distillation.guidance), x_t, drawn.t)

    @torch.no_grad()
    def _changes(self, models: Models, drawn: Draw, x_t: Tensor, delta: Tensor, early: Tensor) -> Tensor:
        """Δ_t df_θ/dt of the samples that are not early, with the dropout masks of the pass with gradient."""

        def change(rows: Tensor) -> Tensor:
            some, x = drawn.select(rows), x_t[to_device(rows, x_t.device)]
            dx_dt = self.velocity(models, some, x)
            return column(delta[rows], x) * tangent(models["student"], x, some.t, dx_dt, some.condition, some.masks)

        out = torch.zeros_like(x_t)
        fill(out, ~early, change, models["student"])
        return out


@torch.no_grad()
def _boundary(models: Models, drawn: Draw, x_t: Tensor, early: Tensor) -> Tensor:
    """f_θ0⁻(x_t, t) of the early samples."""
    out = torch.zeros_like(x_t)
    if bool(early.any()):
        model_of(models, "frozen", "the boundary", drawn.t[early])
    if "frozen" in models:
        frozen = models["frozen"]
        fill(out, early, partial(evaluated, frozen, x_t, drawn.t, drawn), frozen)
    return out
