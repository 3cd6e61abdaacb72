"""The free-form network F: DDPM++ and EDM2, built from frozen configs."""

from typing import Annotated

from pydantic import Field

from tcm.method.preconditioning import Network
from tcm.networks.ddpmpp import DDPMpp, DDPMppConfig
from tcm.networks.edm2 import EDM2, EDM2Config

__all__ = ["EDM2", "DDPMpp", "DDPMppConfig", "EDM2Config", "NetworkConfig", "build_network"]

NetworkConfig = Annotated[DDPMppConfig | EDM2Config, Field(discriminator="kind")]


def build_network(config: DDPMppConfig | EDM2Config, image_shape: tuple[int, int, int], classes: int) -> Network:
    """The network of a config, freshly initialised.

    >>> network = build_network(DDPMppConfig(channels=16, channel_mult=(1, 2), blocks=1), (1, 8, 8), classes=0)
    >>> sum(parameter.numel() for parameter in network.parameters())
    180193
    """
    match config:
        case DDPMppConfig():
            return DDPMpp(config, image_shape, classes)
        case EDM2Config():
            return EDM2(config, image_shape, classes)
