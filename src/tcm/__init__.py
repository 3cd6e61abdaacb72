"""Truncated Consistency Models: from a diffusion model to one-step generation.

>>> import tcm
>>> model = tcm.load("runs/digits/2-truncated/model")  # doctest: +SKIP
>>> images = model.sample(64, steps=1, seed=0)  # doctest: +SKIP
"""

from tcm.method.averaging import Average, ConstantDecay, PowerDecay
from tcm.method.curriculum import Curriculum
from tcm.method.distances import PseudoHuber, SquaredL2
from tcm.method.objectives import (
    Batch,
    Consistency,
    Diffusion,
    Distillation,
    Models,
    Pairs,
    TruncatedConsistency,
)
from tcm.method.preconditioning import Denoiser, Network, Uncertainty
from tcm.method.streams import SampleStreams
from tcm.method.times import LogNormal, LogStudentT
from tcm.networks import DDPMppConfig, EDM2Config, NetworkConfig
from tcm.weights import Model, ModelCard, load

__all__ = [
    "Average",
    "Batch",
    "Consistency",
    "ConstantDecay",
    "Curriculum",
    "DDPMppConfig",
    "Denoiser",
    "Diffusion",
    "Distillation",
    "EDM2Config",
    "LogNormal",
    "LogStudentT",
    "Model",
    "ModelCard",
    "Models",
    "Network",
    "NetworkConfig",
    "Pairs",
    "PowerDecay",
    "PseudoHuber",
    "SampleStreams",
    "SquaredL2",
    "TruncatedConsistency",
    "Uncertainty",
    "load",
]
