"""From the free-form network F to the consistency function f. TCM Eq. 3, App. F."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from tcm.foundation.devices import to_device
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition, ConditionKind

Masks = Sequence[Tensor]
"""One boolean tensor (B, *shape) per dropout layer; true keeps the activation."""


class Network(nn.Module, ABC):
    """The free-form F_θ(x, c_noise): what every network offers.

    Dropout is an argument, not a mode: a mask is drawn once per sample and can be replayed for any subset,
    so that student and target share it. Networks are in eval mode throughout, in training too: nothing that a mode
    switches on (torch's own dropout, statistics of a batch) could be replayed or resumed.
    """

    dropout: float = 0.0
    dropout_shapes: tuple[tuple[int, ...], ...] = ()
    arithmetic: torch.dtype | None = None
    """What F computes in while its weights stay in float32; None: in what its weights are."""

    @abstractmethod
    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        """F_θ(x, c_noise) under a condition; without `masks` nothing is dropped."""

    def normalize_weights(self) -> None:
        """Forced weight normalisation, called before each optimiser step."""

    def blocks(self) -> list[nn.Module]:
        """The parts whose weights are gathered one at a time where processes share them (FSDP2), inner before outer."""
        lists = [module for module in self.modules() if isinstance(module, nn.ModuleList)]
        return [block for parts in reversed(lists) for block in parts if not isinstance(block, nn.ModuleList)]

    def learning(self) -> list[nn.Parameter]:
        """The parameters that training moves: all, unless a network says otherwise."""
        return list(self.parameters())

    def starting_from(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the model that it starts from, under its own names."""
        return dict(weights)

    def published_names(self) -> dict[str, str]:
        """The name of each of its tensors in the reference's checkpoints."""
        raise TcmError(f"network={type(self).__name__} has no counterpart in the reference implementation")

    def published_constants(self) -> dict[str, Tensor]:
        """Constants that the reference's checkpoints hold besides the weights."""
        return {}

    def draw_masks(self, streams: SampleStreams) -> Masks | None:
        """Draw each sample's dropout masks."""
        if self.dropout == 0:
            return None
        # All layers' masks in one draw per sample: on an accelerator each draw is a separate kernel.
        sizes = [prod(shape) for shape in self.dropout_shapes]
        together = torch.split(streams.bernoulli((sum(sizes),), 1 - self.dropout), sizes, dim=1)
        return [mask.view(len(mask), *shape) for mask, shape in zip(together, self.dropout_shapes, strict=True)]


class Uncertainty(nn.Module):
    """EDM2's learned uncertainty u(t) of the denoising task: a linear map of random Fourier features of c_noise."""

    freqs: Tensor
    phases: Tensor

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        self.register_buffer("freqs", 2 * torch.pi * torch.randn(channels))
        self.register_buffer("phases", 2 * torch.pi * torch.rand(channels))
        self.weight = nn.Parameter(torch.randn(1, channels))

    def forward(self, c_noise: Tensor) -> Tensor:
        """u(t), one number per sample."""
        features = sqrt(2) * torch.cos(torch.outer(c_noise, self.freqs) + self.phases)
        rms = self.weight.square().mean().sqrt() + 1e-4
        return features @ (self.weight[0] / (rms * sqrt(self.weight.numel())))


def c_skip(t: Tensor, sigma_data: float) -> Tensor:
    """c_skip(t) = σ² / (σ² + t²)."""
    return sigma_data**2 / (sigma_data**2 + t**2)


def c_out(t: Tensor, sigma_data: float) -> Tensor:
    """c_out(t) = t σ / √(σ² + t²)."""
    return t * sigma_data / (sigma_data**2 + t**2).sqrt()


def c_in(t: Tensor, sigma_data: float) -> Tensor:
    """c_in(t) = 1 / √(σ² + t²)."""
    return 1 / (sigma_data**2 + t**2).sqrt()


def c_noise(t: Tensor) -> Tensor:
    """c_noise(t) = ln(t) / 4."""
    return t.log() / 4


@dataclass(frozen=True)
class Preconditioning:
    """How f is made of F. A frozen dataclass; in recipes and model cards its `kind` names it.

    Here are EDM's functions, TCM App. F; a subclass replaces those in which it differs.
    """

    def c_skip(self, t: Tensor, sigma_data: float) -> Tensor:
        return c_skip(t, sigma_data)

    def c_out(self, t: Tensor, sigma_data: float) -> Tensor:
        return c_out(t, sigma_data)

    def c_in(self, t: Tensor, sigma_data: float) -> Tensor:
        return c_in(t, sigma_data)

    def c_noise(self, t: Tensor, sigma_data: float) -> Tensor:
        return c_noise(t)


@dataclass(frozen=True)
class EDM(Preconditioning):
    """EDM's: f is the identity at t = 0."""

    kind: Literal["edm"] = "edm"


@dataclass(frozen=True)
class Shifted(Preconditioning):
    """CM's: f is the identity at t = ε, by c_skip(t) = σ² / (σ² + (t − ε)²), c_out(t) = (t − ε) σ / √(σ² + t²).

    >>> cm, epsilon = Shifted(0.002), torch.tensor(0.002)
    >>> float(cm.c_skip(epsilon, 0.5)), float(cm.c_out(epsilon, 0.5))
    (1.0, 0.0)
    """

    epsilon: float = 0.002
    kind: Literal["shifted"] = "shifted"

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise TcmError(f"epsilon={self.epsilon:g}, the time at which f is the identity, must be at least 0")

    def c_skip(self, t: Tensor, sigma_data: float) -> Tensor:
        return c_skip(t - self.epsilon, sigma_data)

    def c_out(self, t: Tensor, sigma_data: float) -> Tensor:
        return (t - self.epsilon) * sigma_data * c_in(t, sigma_data)


USUAL = EDM()
PRECONDITIONINGS: dict[str, type[Preconditioning]] = {"edm": EDM, "shifted": Shifted}


def column(t: Tensor, like: Tensor) -> Tensor:
    """t (B,), shaped to multiply images `like` (B, C, H, W), on their device."""
    return to_device(t.to(like.dtype), like.device)[:, None, None, None]


class Denoiser(nn.Module):
    """f_θ(x, t) = c_skip(t) x + c_out(t) F_θ(c_in(t) x, c_noise(t)). TCM Eq. 3.

    The same function serves as the diffusion model's denoiser D and as the consistency function f. It is defined
    for t in [t_min, t_max]; a truncated model's t_min is t'. Everything but F is computed in float32.
    """

    weights_are_shared: bool = False
    """Whether processes share its weights (FSDP2). Then all of them have to call it, and equally often."""

    def __init__(
        self,
        network: Network,
        image_shape: tuple[int, int, int],
        condition: ConditionKind | None = None,
        *,
        sigma_data: float = 0.5,
        t_min: float = 0.002,
        t_max: float = 80.0,
        uncertainty: Uncertainty | None = None,
        preconditioning: Preconditioning = USUAL,
    ) -> None:
        super().__init__()
        self.network = network
        self.image_shape = image_shape
        self.condition = condition
        self.sigma_data = sigma_data
        self.t_min = t_min
        self.t_max = t_max
        self.uncertainty = uncertainty
        self.preconditioning = preconditioning
        self.eval()

    def learn(self, learns: bool = True) -> None:
        """Let the parameters that training moves have gradients, or none of them."""
        self.requires_grad_(False)
        heads = [] if self.uncertainty is None else list(self.uncertainty.parameters())
        for parameter in [*self.network.learning(), *heads]:
            parameter.requires_grad_(learns)

    def forward(self, x: Tensor, t: Tensor, condition: Condition | None = None, masks: Masks | None = None) -> Tensor:
        """f_θ(x, t) for images x (B, C, H, W) and times t (B,), under a condition."""
        x = x.float()
        # One copy to the device for all that is computed from t.
        c = self.preconditioning
        scales = torch.stack([c_i(t, self.sigma_data) for c_i in (c.c_in, c.c_skip, c.c_out, c.c_noise)])
        scale_in, scale_skip, scale_out, noise = to_device(scales.to(x.dtype), x.device)[..., None, None, None]
        F_x = self.network(scale_in * x, noise.flatten(), condition, masks).float()
        return scale_skip * x + scale_out * F_x
