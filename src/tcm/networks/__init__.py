"""The free-form network F: each kind in its own file, listed here."""

from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from tcm.foundation.plugins import all_classes, reader_of
from tcm.networks.base import ImageShape, NetworkConfig
from tcm.networks.ddpmpp import DDPMppConfig
from tcm.networks.diffusers_unet import DiffusersUNetConfig
from tcm.networks.edm2 import EDM2Config
from tcm.networks.text_unet import TextUNetConfig

__all__ = [
    "NETWORKS",
    "AnyNetwork",
    "DDPMppConfig",
    "DiffusersUNetConfig",
    "EDM2Config",
    "ImageShape",
    "NetworkConfig",
    "TextUNetConfig",
    "networks",
]

NETWORKS: dict[str, type[NetworkConfig]] = {
    "ddpmpp": DDPMppConfig,
    "edm2": EDM2Config,
    "text_unet": TextUNetConfig,
    "diffusers_unet": DiffusersUNetConfig,
}


def networks() -> dict[str, type[NetworkConfig]]:
    """Our kinds of networks, and those of installed packages."""
    return all_classes(NETWORKS, NetworkConfig, "tcm.networks")


AnyNetwork = Annotated[
    SerializeAsAny[NetworkConfig], BeforeValidator(reader_of(NETWORKS, NetworkConfig, "tcm.networks"))
]
"""A network's config, read from a table by its `kind`: ours, an entry point of `tcm.networks`, or `module:Class`."""
