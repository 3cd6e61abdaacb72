"""Small models with weights that matter: networks begin with outputs near zero."""

import torch

import tcm
from tcm.method.conditions import ConditionKind
from tcm.networks import NetworkConfig

DDPMPP = tcm.DDPMppConfig(channels=8, channel_mult=(1, 2), blocks=1, attention=(8,))
EDM2 = tcm.EDM2Config(channels=64, channel_mult=(1,), blocks=1, attention=(8,))


def small_model(
    network: NetworkConfig, condition: ConditionKind | None = None, channels: int = 3, **card: object
) -> tcm.Model:
    """An untrained model of 8 × 8 images whose every weight counts."""
    fields = {"kind": "truncated", "t_min": 1.0, "image_shape": (channels, 8, 8)} | card
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tcm.Model.fresh(tcm.ModelCard(network=network, condition=condition, **fields))
        for parameter in model.denoiser.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.ndim else 0.5)
    return model
