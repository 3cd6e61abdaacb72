"""Denoisers and consistency functions in closed form: exact truths to test the method, the solvers and the scores by.

An `Exact` is a `Denoiser` whose f is a formula, in the precision of its input; a `Formula` is the same as a `Network`
F, so that the real `Denoiser` wraps it. Functions take (x, t, labels) with t shaped to multiply x, labels as a tensor.

>>> f = Exact(gaussian_consistency(0.5), (1, 2, 2))
>>> f(torch.ones(1, 1, 2, 2), torch.tensor([0.0])).flatten().tolist()
[1.0, 1.0, 1.0, 1.0]
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from tcm import Denoiser, Network
from tcm.method.conditions import Condition, Labels
from tcm.method.preconditioning import Masks, c_in, c_out, c_skip

Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def gaussian_consistency(s: float) -> Function:
    """f(x, t) = x s/√(s² + t²): the consistency function of N(0, s²)."""
    return lambda x, t, labels: x * s / (s**2 + t**2).sqrt()


def gaussian_denoiser(s: float) -> Function:
    """D(x, t) = x s²/(s² + t²): the ideal denoiser of N(0, s²)."""
    return lambda x, t, labels: x * s**2 / (s**2 + t**2)


def finite_denoiser(points: Tensor, point_labels: Tensor | None = None) -> Function:
    """D(x, t) = Σ_i softmax_i(−‖x − p_i‖²/2t²) p_i: the ideal denoiser of a finite data set `points` (N, C, H, W).

    With `point_labels`, a sample of class k is denoised towards the points of class k, one without class (−1) to all.
    """

    def denoise(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        known = points.to(x)
        distances = (x[:, None] - known[None]).flatten(2).square().sum(2)
        logits = -distances / (2 * t.reshape(-1, 1) ** 2)
        if labels is not None and point_labels is not None:
            foreign = (labels[:, None] != point_labels[None]) & (labels[:, None] >= 0)
            logits = logits.masked_fill(foreign, -torch.inf)
        return (logits.softmax(1) @ known.flatten(1)).view_as(x)

    return denoise


def follow_pf_ode(denoise: Function, x: Tensor, t: float, r: float) -> Tensor:
    """x_r on the PF-ODE's trajectory through x at time t, by scipy at high precision (float64)."""

    def slope(u: float, flat: np.ndarray) -> np.ndarray:
        now = torch.from_numpy(flat).view(x.shape)
        time = torch.full((len(x), 1, 1, 1), u, dtype=torch.float64)
        return ((now - denoise(now, time, None)) / u).numpy().ravel()

    start = x.double().numpy().ravel()
    solution = solve_ivp(slope, (t, r), start, method="DOP853", rtol=1e-10, atol=1e-12)
    assert solution.success
    return torch.from_numpy(solution.y[:, -1]).view(x.shape)


def labels_of(condition: Condition | None) -> Tensor | None:
    """The labels as the functions take them."""
    return condition.index if isinstance(condition, Labels) else None


class NoNetwork(Network):
    """The network of a denoiser that needs none."""

    dropout, dropout_shapes = 0.0, ()

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        raise NotImplementedError

    def normalize_weights(self) -> None:
        raise NotImplementedError


class Exact(Denoiser):
    """gain · function(x, t, labels) in the precision of x; `gain` is 1, and something to take gradients by."""

    def __init__(self, function: Function, image_shape: tuple[int, int, int], *, t_min: float = 0.002) -> None:
        super().__init__(NoNetwork(), image_shape, t_min=t_min)
        self.function = function
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, condition: Condition | None = None, masks: Masks | None = None) -> Tensor:
        return self.gain.to(x) * self.function(x, t.to(x)[:, None, None, None], labels_of(condition))


class Formula(NoNetwork):
    """F = (function(x, t) − c_skip x)/c_out of x and t as they were before preconditioning, in float64 inside."""

    def __init__(self, function: Function, sigma_data: float = 0.5) -> None:
        super().__init__()
        self.function, self.sigma_data = function, sigma_data
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        t = (4 * c_noise.double()).exp()[:, None, None, None]
        noisy = x.double() / c_in(t, self.sigma_data)
        out = self.function(noisy, t, labels_of(condition)) - c_skip(t, self.sigma_data) * noisy
        return self.gain * (out / c_out(t, self.sigma_data)).to(x)
