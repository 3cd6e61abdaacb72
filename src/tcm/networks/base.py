"""What every network says about itself: a config that checks and builds it, and its published names if it has them."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from tcm.foundation.errors import TcmError
from tcm.method.conditions import ConditionKind
from tcm.method.preconditioning import Network

ImageShape = tuple[int, int, int]


class NetworkConfig(BaseModel):
    """A network as data: `kind` names it in recipes and model cards."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    dropout: float = Field(default=0.0, ge=0, lt=1, description="probability that an activation is dropped")

    published_types: ClassVar[tuple[str, ...]] = ()
    """The names of the reference's classes that are this network."""

    @abstractmethod
    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> Network:
        """The network, freshly initialised."""

    def check(self, image_shape: ImageShape) -> None:
        """Refuse, before anything is built, images that the network cannot take."""

    @classmethod
    def from_published(cls, arguments: Mapping[str, object]) -> Self:
        """The config of the reference's constructor arguments."""
        raise TcmError(f"a {cls.__name__} has no published checkpoints")

    def published_arguments(self) -> dict[str, object]:
        """The reference's constructor arguments."""
        raise TcmError(f"network.kind={self.kind!r} has no published form; DDPM++ and EDM2 have")
