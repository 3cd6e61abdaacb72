"""What `import tcm` offers, with all the libraries that it needs."""

from tcm.foundation.randomness import SampleStreams
from tcm.method.averaging import Average, ConstantDecay, PowerDecay
from tcm.method.conditions import Classes, ClassMix, Condition, Labels, TextEmbeddings
from tcm.method.curriculum import Curriculum
from tcm.method.distances import PseudoHuber, SquaredL2
from tcm.method.objectives import (
    Batch,
    Consistency,
    Diffusion,
    Distillation,
    Models,
    Pairs,
    Tangents,
    TruncatedConsistency,
)
from tcm.method.preconditioning import Denoiser, Network, Uncertainty
from tcm.method.sampling import ConsistencySampler, HeunSampler, Sampler
from tcm.method.times import LogNormal, LogStudentT
from tcm.networks import DDPMppConfig, EDM2Config, NetworkConfig
from tcm.text.condition import Texts
from tcm.weights import Model, ModelCard, load

__all__ = [
    "Average",
    "Batch",
    "ClassMix",
    "Classes",
    "Condition",
    "Consistency",
    "ConsistencySampler",
    "ConstantDecay",
    "Curriculum",
    "DDPMppConfig",
    "Denoiser",
    "Diffusion",
    "Distillation",
    "EDM2Config",
    "HeunSampler",
    "Labels",
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
    "Sampler",
    "SquaredL2",
    "Tangents",
    "TextEmbeddings",
    "Texts",
    "TruncatedConsistency",
    "Uncertainty",
    "load",
]
