"""A truncated model and its companion, the stage-1 model that it was trained from, as one function. TCM Eq. 5."""

import torch
from torch import Tensor

from tcm.foundation.devices import to_device
from tcm.method.conditions import Condition
from tcm.method.preconditioning import Denoiser, Masks


class Joined(Denoiser):
    """f^trunc(x, t) = f_θ(x, t) 1{t > t'} + f_θ0(x, t) 1{t ≤ t'}, defined on [t_min, T]. TCM Eq. 5.

    At t' itself, where the two are to agree, f_θ0 is what f_θ was trained towards. `alone` is f_θ, `companion` f_θ0.
    """

    def __init__(self, f: Denoiser, companion: Denoiser) -> None:
        super().__init__(
            f.network,
            f.image_shape,
            f.condition,
            sigma_data=f.sigma_data,
            t_min=companion.t_min,
            t_max=f.t_max,
            uncertainty=f.uncertainty,
            preconditioning=f.preconditioning,
        )
        self.alone, self.companion, self.t_prime = f, companion, f.t_min

    def forward(self, x: Tensor, t: Tensor, condition: Condition | None = None, masks: Masks | None = None) -> Tensor:
        """f^trunc(x, t); each image goes through one network only."""
        early = t <= self.t_prime
        if not bool(early.any()):
            return self.alone.forward(x, t, condition, masks)
        if bool(early.all()):
            return self.companion.forward(x, t, condition, masks)
        out = torch.empty_like(x, dtype=torch.float32)
        for f, rows in ((self.alone.forward, ~early), (self.companion.forward, early)):
            here = to_device(rows, x.device)
            some = None if condition is None else condition.select(here)
            out[here] = f(x[here], t[rows], some, None if masks is None else [mask[here] for mask in masks])
        return out
