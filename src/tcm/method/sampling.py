"""From noise to images: one, two, n evaluations of f; Heun's method for the diffusion model. TCM Sec. 4, App. F."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tcm.errors import TcmError
from tcm.method.preconditioning import Denoiser
from tcm.method.solvers import euler, guided, heun, karras_times
from tcm.method.streams import SampleStreams


def consistency_times(steps: int, t_max: float, t_last: float) -> list[float]:
    """`steps` times from T down to `t_last`, evenly spaced in ln t; a single step is at T.

    >>> consistency_times(1, 80.0, 1.0), consistency_times(2, 80.0, 1.0)
    ([80.0], [80.0, 1.0])
    """
    if steps < 1:
        raise TcmError(f"steps={steps} makes no image; use at least 1")
    if steps == 1:
        return [t_max]
    return [t_max, *(t_max * (t_last / t_max) ** (i / (steps - 1)) for i in range(1, steps - 1)), t_last]


@torch.no_grad()
def sample_consistency(
    f: Denoiser, times: Sequence[float], streams: SampleStreams, labels: Tensor | None = None
) -> Tensor:
    """x ← f(x + t ε, t) for each t of `times`, from x = 0: the first time is T, where the noise drowns everything.

    The images are a function of the streams' seeds alone, not of the batch that they are made in.
    """
    check_times(f, times)
    x = torch.zeros(len(streams), *f.image_shape, device=_device_of(f))
    for t in times:
        eps = streams.normal(f.image_shape).to(x.device)
        x = f(x + t * eps, torch.full((len(x),), t), labels)
    return x


@torch.no_grad()
def sample_heun(
    D: Denoiser, steps: int, streams: SampleStreams, labels: Tensor | None = None, guidance: float = 1.0
) -> Tensor:
    """EDM's deterministic sampler: Heun steps down the Karras grid, an Euler step to 0: 2 `steps` − 1 evaluations."""
    denoise = guided(D, labels, guidance)
    times = karras_times(steps, D.t_min, D.t_max)
    x = times[0] * streams.normal(D.image_shape).to(_device_of(D))
    for t, r in zip(times, [*times[1:], 0.0], strict=True):
        step = heun if r > 0 else euler
        x = step(denoise, x, torch.full((len(x),), t), torch.full((len(x),), r))
    return x


def check_times(f: Denoiser, times: Sequence[float]) -> None:
    """Refuse times where the model is undefined: a silent bad picture is worse than an error."""
    if not times:
        raise TcmError(f"times is empty; use at least one time, such as {f.t_max:g}")
    if times[0] != f.t_max:
        raise TcmError(
            f"times[0]={times[0]:g} is not T={f.t_max}, where sampling starts from noise; use {f.t_max} first"
        )
    for place, t in enumerate(times):
        if not t >= f.t_min:
            remedy = f"use a time of at least {f.t_min:g}"
            raise TcmError(f"times[{place}]={t:g} lies below {f.t_min:g}, where this model is undefined; {remedy}")
        if t > f.t_max:
            remedy = f"use a time of at most {f.t_max:g}"
            raise TcmError(f"times[{place}]={t:g} lies above {f.t_max:g}, where this model is undefined; {remedy}")
        if place and t >= times[place - 1]:
            raise TcmError(f"times[{place}]={t:g} does not lie below times[{place - 1}]; sort the times downwards")


def _device_of(f: Denoiser) -> torch.device:
    return next(f.parameters()).device
