"""The free-form network F: DDPM++ and EDM2, built from frozen configs."""

from typing import Annotated

from pydantic import Field

from tcm.errors import TcmError
from tcm.method.preconditioning import Network
from tcm.networks.ddpmpp import DDPMpp, DDPMppConfig
from tcm.networks.edm2 import CHANNELS_PER_HEAD, EDM2, EDM2Config
from tcm.networks.layers import check_image_shape, decoder_plan, encoder_plan

__all__ = ["EDM2", "DDPMpp", "DDPMppConfig", "EDM2Config", "NetworkConfig", "build_network", "check_network"]

NetworkConfig = Annotated[DDPMppConfig | EDM2Config, Field(discriminator="kind")]


def build_network(config: DDPMppConfig | EDM2Config, image_shape: tuple[int, int, int], classes: int) -> Network:
    """The network of a config, freshly initialised.

    >>> network = build_network(DDPMppConfig(channels=16, channel_mult=(1, 2), blocks=1), (1, 8, 8), classes=0)
    >>> sum(parameter.numel() for parameter in network.parameters())
    180193
    """
    check_network(config, image_shape)
    match config:
        case DDPMppConfig():
            return DDPMpp(config, image_shape, classes)
        case EDM2Config():
            return EDM2(config, image_shape, classes)


def check_network(config: DDPMppConfig | EDM2Config, image_shape: tuple[int, int, int]) -> None:
    """Refuse, before anything is built, widths and image sizes that the network's layers cannot divide."""
    check_image_shape(config, image_shape)
    edm2 = isinstance(config, EDM2Config)
    first = config.channels * (config.channel_mult[0] if edm2 else 1)
    encoder = encoder_plan(config, image_shape, image_shape[0], first)
    for block in encoder[1:] + decoder_plan(config, image_shape, encoder, every_block_attends=edm2):
        if edm2 and block.attention and block.channels_out % max(1, block.channels_out // CHANNELS_PER_HEAD):
            raise TcmError(
                f"network.channels={config.channels} gives an attention layer of {block.channels_out} channels, which "
                f"its {block.channels_out // CHANNELS_PER_HEAD} heads do not divide; use a multiple of "
                f"{CHANNELS_PER_HEAD}"
            )
        for width in (block.channels_in, block.channels_out):
            if not edm2 and (width < 4 or width % min(32, width // 4)):
                raise TcmError(
                    f"network.channels={config.channels} gives a layer of {width} channels, which group normalisation "
                    f"cannot divide into {min(32, width // 4)} groups; use a multiple of 32"
                )
