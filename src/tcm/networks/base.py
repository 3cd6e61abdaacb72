"""What every network says about itself: a config that checks and builds it, and its published names if it has them."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Classes, ConditionKind
from tcm.method.preconditioning import Network
from tcm.method.sampling import Sampler

ImageShape = tuple[int, int, int]


Blocks = Annotated[int, Field(gt=0, le=1000)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class NetworkConfig(BaseModel):
    """A network as data: `kind` names it in recipes and model cards."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    dropout: Dropout = Field(default=0.0, description="probability that an activation is dropped")

    replays_dropout: ClassVar[bool] = False
    """Whether its network drops by the masks that it is given. One that does not cannot be trained with dropout."""
    comes_with_pipeline: ClassVar[bool] = False
    """Whether its network is a diffusers pipeline's, so that a recipe takes its shape from the pipeline."""
    free_keys: ClassVar[frozenset[str]] = frozenset({"dropout"})
    """The keys in which a model and the one that it starts from may differ."""
    builds_from_values: ClassVar[bool] = False
    """Whether its network is `Class(config, image_shape, classes)` for anything that has the config's values. Then the
    network's source can travel with its weights, to people without this package."""
    computes_in_half: ClassVar[bool] = False
    """Whether its network obeys `Network.arithmetic`. One that does not has tangents in fp32 only."""
    published_types: ClassVar[tuple[str, ...]] = ()
    """The names of the reference's classes that are this network; the first is the usual one."""
    published_defaults: ClassVar[Mapping[str, object]] = {}
    """The arguments of the reference's class where none are given."""
    published_mark: ClassVar[str | None] = None
    """A regular expression for the name of the one tensor that tells where in a file the network begins."""

    @abstractmethod
    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> Network:
        """The network, freshly initialised."""

    @classmethod
    def takes(cls, condition: ConditionKind | None) -> bool:
        """Whether its network can learn this kind of condition: by default classes, or none."""
        return isinstance(condition, Classes | None)

    def check(self, image_shape: ImageShape) -> None:
        """Refuse, before anything is built, images that the network cannot take."""

    def check_scales(self, sigma_data: float, t_max: float) -> None:
        """Refuse a variance of the data, or noise, that the network is not made for."""

    def sampled_by(self, sampler: Sampler) -> Sampler:
        """The sampler of a stage, as this network needs it."""
        return sampler

    def keeping_all(self) -> Self:
        """The same network, keeping all activations for the backward pass; itself unless it recomputes some."""
        return self

    @classmethod
    def from_published(cls, arguments: Mapping[str, object]) -> Self:
        """The config of the reference's constructor arguments."""
        raise TcmError(f"a {cls.__name__} has no published checkpoints")

    @classmethod
    def check_published(cls, arguments: Mapping[str, object]) -> dict[str, object]:
        """Of the arguments that a file gives to the reference's class, those that matter; an error for invalid ones."""
        raise TcmError(f"a {cls.__name__} has no published checkpoints")

    @classmethod
    def infer_published(cls, weights: Mapping[str, Tensor]) -> dict[str, object] | None:
        """The arguments that fit the published tensors, with the preconditioning's; None if they are not its own."""
        return None

    @classmethod
    def published_left_out(cls, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """The published tensors that its network has no use for, each with the reason."""
        return {}

    def published_arguments(self) -> dict[str, object]:
        """The reference's constructor arguments."""
        raise TcmError(f"network.kind={self.kind!r} has no published form")
