"""Truncated Consistency Models: from a diffusion model to one-step generation.

>>> import tcm
>>> model = tcm.load("runs/digits/2-truncated/model")  # doctest: +SKIP
>>> images = model.sample(64, steps=1, seed=0)  # doctest: +SKIP
"""

# ruff: noqa: F403, F405 (a type checker finds all names in tcm.api)

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from tcm.api import *
else:

    def __getattr__(name: str) -> object:
        """Import the library at the first use of one of its names, so that `tcm --help` need not wait for torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("tcm.api"), name)

    def __dir__() -> list[str]:
        return __all__
