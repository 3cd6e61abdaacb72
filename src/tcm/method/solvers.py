"""The probability-flow ODE dx/dt = (x − D(x, t))/t: one step of a solver, and a grid of times. TCM Eq. 2."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Condition
from tcm.method.preconditioning import Denoiser, column

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x, t) ↦ D(x, t), the expected clean image."""

Step = Callable[[Denoise, Tensor, Tensor, Tensor], Tensor]
"""(D, x_t, t, r) ↦ x_r."""


def guided(denoiser: Denoiser, condition: Condition | None, scale: float = 1.0) -> Denoise:
    """D(x, t | c), with classifier-free guidance D(x, t) + scale (D(x, t | c) − D(x, t)) unless scale = 1."""

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        conditional = denoiser(x, t, condition)
        if scale == 1 or condition is None:
            return conditional
        return torch.lerp(denoiser(x, t, condition.null()), conditional, scale)

    return denoise


def slope(denoise: Denoise, x: Tensor, t: Tensor) -> Tensor:
    """dx/dt = (x − D(x, t))/t."""
    return (x - denoise(x, t)) / column(t, x)


def euler(denoise: Denoise, x_t: Tensor, t: Tensor, r: Tensor) -> Tensor:
    """x_r = x_t + (r − t) dx/dt(x_t, t): first order, one evaluation."""
    return x_t + column(r - t, x_t) * slope(denoise, x_t, t)


def heun(denoise: Denoise, x_t: Tensor, t: Tensor, r: Tensor) -> Tensor:
    """x_r = x_t + (r − t) (slope at t + slope at r)/2: second order, two evaluations; needs r > 0."""
    slope_t = slope(denoise, x_t, t)
    x_r = x_t + column(r - t, x_t) * slope_t
    return x_t + column(r - t, x_t) * (slope_t + slope(denoise, x_r, r)) / 2


SolverName = Literal["euler", "heun"]
SOLVERS: dict[SolverName, Step] = {"euler": euler, "heun": heun}
EVALUATIONS: dict[SolverName, int] = {"euler": 1, "heun": 2}
"""Evaluations of D in one step."""


def karras_times(steps: int, t_min: float, t_max: float, rho: float = 7.0) -> list[float]:
    """EDM's grid from t_max down to t_min: t_i = (t_max^(1/ρ) + i/(n−1) (t_min^(1/ρ) − t_max^(1/ρ)))^ρ.

    >>> [round(t, 3) for t in karras_times(3, 0.002, 80.0)]
    [80.0, 2.515, 0.002]
    """
    if steps < 1:
        raise TcmError(f"steps={steps} is too low; use at least 1")
    if steps == 1:
        return [t_max]
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
    times = (t_max ** (1 / rho) + ramp * (t_min ** (1 / rho) - t_max ** (1 / rho))) ** rho
    return [t_max, *times[1:-1].tolist(), t_min]
