"""The free-form network F: each kind in a file of its own, listed here."""

from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from tcm.foundation.plugins import find_class, read_table
from tcm.networks.base import ImageShape, NetworkConfig
from tcm.networks.ddpmpp import DDPMppConfig
from tcm.networks.edm2 import EDM2Config

__all__ = ["NETWORKS", "AnyNetwork", "DDPMppConfig", "EDM2Config", "ImageShape", "NetworkConfig", "network_class"]

NETWORKS: dict[str, type[NetworkConfig]] = {"ddpmpp": DDPMppConfig, "edm2": EDM2Config}


def network_class(kind: str) -> type[NetworkConfig]:
    """The config of a kind: one of ours, an entry point of the group `tcm.networks`, or `module:Class`."""
    return find_class("kind", kind, NETWORKS, NetworkConfig, "tcm.networks")


def _read(table: Any) -> Any:
    return read_table(table, "kind", network_class)


AnyNetwork = Annotated[SerializeAsAny[NetworkConfig], BeforeValidator(_read)]
"""A network's config, read from a table by its `kind`."""
