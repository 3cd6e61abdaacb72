"""From noise to images: one, two, n evaluations of f; Heun's method for the diffusion model. TCM Sec. 4, App. F.

A sampler is a generator over its steps; the last step's `x` are the images.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition
from tcm.method.preconditioning import Denoiser
from tcm.method.solvers import euler, guided, heun, karras_times


@dataclass(frozen=True)
class SamplingStep:
    """One step: what the model was given at time t, and the images x after it."""

    t: float
    x_t: Tensor
    x: Tensor


@torch.no_grad()
def consistency_steps(
    f: Denoiser,
    times: Sequence[float],
    streams: SampleStreams,
    condition: Condition | None = None,
    first: Tensor | None = None,
    marginal: bool = False,
) -> Iterator[SamplingStep]:
    """x ← f(x + t ε, t) for each t of `times`, from x = 0: the first time is T, where the noise drowns everything.

    The images are a function of the streams' seeds alone, not of the batch that they are made in; `first` replaces the
    first ε. Where T does not drown everything, `marginal` gives the first x_t the variance σ² + T² of x + T ε.
    """
    check_times(f, times)
    x = torch.zeros(len(streams), *f.image_shape, device=_device_of(f))
    for index, t in enumerate(times):
        eps = streams.normal(f.image_shape)
        scale = t if index or not marginal else sqrt(f.sigma_data**2 + t**2)
        x_t = x + scale * (eps if index or first is None else first).to(x.device)
        x = f(x_t, torch.full((x.shape[0],), t), condition)
        yield SamplingStep(t, x_t, x)


@torch.no_grad()
def heun_steps(
    D: Denoiser,
    steps: int,
    streams: SampleStreams,
    condition: Condition | None = None,
    guidance: float = 1.0,
    first: Tensor | None = None,
) -> Iterator[SamplingStep]:
    """EDM's deterministic sampler: Heun steps down the Karras grid, an Euler step to 0: 2 `steps` − 1 evaluations.

    It begins with the noise `first`, or one from the streams.
    """
    denoise = guided(D, condition, guidance)
    times = karras_times(steps, D.t_min, D.t_max)
    x = times[0] * (streams.normal(D.image_shape) if first is None else first).to(_device_of(D))
    for t, r in zip(times, [*times[1:], 0.0], strict=True):
        x_t, step = x, heun if r > 0 else euler
        x = step(denoise, x_t, torch.full((x.shape[0],), t), torch.full((x.shape[0],), r))
        yield SamplingStep(t, x_t, x)


@dataclass(frozen=True)
class Sampler(ABC):
    """How a model is sampled: its card holds the fields, and `kind` names the class, such as `module:Class`."""

    kind: str

    model: ClassVar[str]
    """What people call a model that is sampled in this way."""
    generates_at_once: ClassVar[bool]
    """Whether one evaluation gives an image: then its denoising at each t is worth measuring too."""

    @property
    @abstractmethod
    def usual_steps(self) -> tuple[int, ...]:
        """The numbers of steps that a report shows and measures; the first is the default."""

    @abstractmethod
    def run(
        self,
        f: Denoiser,
        streams: SampleStreams,
        condition: Condition | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        first: Tensor | None = None,
    ) -> Iterator[SamplingStep]:
        """Sample in `steps` steps, or at the `times` themselves; `first` is the noise to begin with, else drawn."""

    def times(self, f: Denoiser, steps: int) -> list[float] | None:
        """The times of x ← f(x + t ε, t) if that is how it samples, as other libraries can too; else None."""
        return None

    @abstractmethod
    def describe(self, f: Denoiser, steps: int | None, times: Sequence[float] | None) -> str:
        """One line for the record of a score."""

    @abstractmethod
    def evaluations(self, steps: int) -> int:
        """Evaluations of the network per image."""

    def from_marginal(self) -> Self:
        """The sampler that begins with the variance of the data too, if it can."""
        return self

    def check_range(self, name: str, low: float, high: float) -> None:  # noqa: B027 (most have nothing to refuse)
        """Refuse fields that do not fit the stage `name`, whose model is defined from low to high."""

    @abstractmethod
    def name(self, steps: int) -> str:
        """A short name for tables."""

    @property
    def uses_null(self) -> bool:
        """Whether the images depend on the null condition too."""
        return False

    def guided(self, scale: float) -> Self:
        """The same sampler, guided by this scale; 1 is no guidance."""
        raise TcmError(
            f"guidance={scale:g}: a {self.model} model is not guided while it is sampled; its guidance is that of its "
            "training"
        )


@dataclass(frozen=True)
class ConsistencySampler(Sampler):
    """A consistency model: x ← f(x + t ε, t) at T, then down to `second_time`.

    With `marginal` the first x_t is √(σ² + T²) ε, as wide as x_T = x + T ε is in training, instead of T ε.
    """

    kind: Literal["consistency"] = "consistency"
    second_time: float = 1.0
    marginal: bool = False

    model = "consistency"
    usual_steps = (1, 2)
    generates_at_once = True

    def __post_init__(self) -> None:
        if not self.second_time > 0:
            raise TcmError(f"second_time={self.second_time:g} must be above 0")

    def times(self, f: Denoiser, steps: int) -> list[float]:
        return consistency_times(steps, f.t_max, max(self.second_time, f.t_min))

    def run(
        self,
        f: Denoiser,
        streams: SampleStreams,
        condition: Condition | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        first: Tensor | None = None,
    ) -> Iterator[SamplingStep]:
        """`steps` steps (1 by default), or the times themselves."""
        return consistency_steps(f, self._times(f, steps, times), streams, condition, first, self.marginal)

    def from_marginal(self) -> Self:
        return replace(self, marginal=True)

    def describe(self, f: Denoiser, steps: int | None, times: Sequence[float] | None) -> str:
        """Such as `times 80, 1`."""
        return "times " + ", ".join(f"{t:g}" for t in self._times(f, steps, times))

    def evaluations(self, steps: int) -> int:
        """One for each step."""
        return steps

    def check_range(self, name: str, low: float, high: float) -> None:
        if not low <= self.second_time < high:
            raise TcmError(
                f"second_time={self.second_time} must be at least {low:g}, where the range of {name} begins, and "
                f"below {high:g}, where its sampling begins; change one of them"
            )

    def name(self, steps: int) -> str:
        """Such as `two steps`."""
        return {1: "one step", 2: "two steps"}.get(steps, f"{steps} steps")

    def _times(self, f: Denoiser, steps: int | None, times: Sequence[float] | None) -> Sequence[float]:
        return self.times(f, self.usual_steps[0] if steps is None else steps) if times is None else times


@dataclass(frozen=True)
class HeunSampler(Sampler):
    """A diffusion model: Heun's method along the probability-flow ODE, with classifier-free guidance or without."""

    kind: Literal["heun"] = "heun"
    guidance: float = 1.0

    model = "diffusion"
    usual_steps = (18,)
    generates_at_once = False

    def run(
        self,
        f: Denoiser,
        streams: SampleStreams,
        condition: Condition | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        first: Tensor | None = None,
    ) -> Iterator[SamplingStep]:
        """`steps` steps (18 by default)."""
        if times is not None:
            raise TcmError(f"times={list(times)} are for consistency models; a diffusion model takes steps, such as 18")
        return heun_steps(f, self._steps(steps), streams, condition, self.guidance, first)

    def describe(self, f: Denoiser, steps: int | None, times: Sequence[float] | None) -> str:
        """Such as `Heun, 18 steps, 35 evaluations`."""
        guidance = f", guidance {self.guidance:g}" if self.uses_null else ""
        return f"Heun, {self._steps(steps)} steps, {self.evaluations(self._steps(steps))} evaluations{guidance}"

    def evaluations(self, steps: int) -> int:
        """Two for each step, one for the last; guidance doubles them."""
        return (2 * steps - 1) * (2 if self.uses_null else 1)

    @property
    def uses_null(self) -> bool:
        return self.guidance != 1

    def guided(self, scale: float) -> Self:
        return replace(self, guidance=scale)

    def name(self, steps: int) -> str:
        """Heun, whatever the number of steps."""
        return f"Heun, guidance {self.guidance:g}" if self.uses_null else "Heun"

    def _steps(self, steps: int | None) -> int:
        return self.usual_steps[0] if steps is None else steps


def last(steps: Iterator[SamplingStep]) -> Tensor:
    """The images that a sampler ends with."""
    for step in steps:
        x = step.x
    return x


def consistency_times(steps: int, t_max: float, t_last: float) -> list[float]:
    """`steps` times from T down to `t_last`, evenly spaced in ln t; a single step is at T.

    >>> consistency_times(1, 80.0, 1.0), consistency_times(2, 80.0, 1.0)
    ([80.0], [80.0, 1.0])
    """
    if steps < 1:
        raise TcmError(f"steps={steps} is too low; use at least 1")
    if steps == 1:
        return [t_max]
    return [t_max, *(t_max * (t_last / t_max) ** (i / (steps - 1)) for i in range(1, steps - 1)), t_last]


def check_times(f: Denoiser, times: Sequence[float]) -> None:
    """Refuse times where the model is undefined: a silent bad picture is worse than an error."""
    if not times:
        raise TcmError(f"times is empty; use at least one time, such as {f.t_max:g}")
    if times[0] != f.t_max:
        raise TcmError(
            f"times[0]={times[0]:g} is not T={f.t_max}, where sampling starts from noise; use {f.t_max} as the first "
            "time"
        )
    for index, t in enumerate(times):
        if not t >= f.t_min:
            remedy = f"use a time of at least {f.t_min:g}"
            raise TcmError(f"times[{index}]={t:g} is below {f.t_min:g}, where this model is undefined; {remedy}")
        if t > f.t_max:
            remedy = f"use a time of at most {f.t_max:g}"
            raise TcmError(f"times[{index}]={t:g} is above {f.t_max:g}, where this model is undefined; {remedy}")
        if index and t >= times[index - 1]:
            raise TcmError(f"times[{index}]={t:g} is not below times[{index - 1}]; sort the times in descending order")


def _device_of(f: Denoiser) -> torch.device:
    return next(f.parameters()).device
