"""A model's card, config.json: its network, its method and the times on which it is defined."""

from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from tcm.foundation.errors import TcmError, describe_validation
from tcm.foundation.files import LARGEST_PICTURE, read_regular
from tcm.foundation.plugins import Trust, reader_of
from tcm.method.conditions import Classes, ConditionKind
from tcm.method.preconditioning import PRECONDITIONINGS, USUAL, Preconditioning
from tcm.method.sampling import ConsistencySampler, HeunSampler, Sampler
from tcm.networks import AnyNetwork
from tcm.text.autoencoders import Latents
from tcm.text.condition import Texts

FILES = CONFIG_FILE, WEIGHTS_FILE, COMPANION_FILE = "config.json", "model.safetensors", "companion.safetensors"

SAMPLERS: dict[str, type[Sampler]] = {"consistency": ConsistencySampler, "heun": HeunSampler}

AnySampler = Annotated[SerializeAsAny[Sampler], BeforeValidator(reader_of(SAMPLERS, Sampler, "tcm.parts"))]
"""A sampler, read from a table by its `kind`: one of ours, an entry point of `tcm.parts`, or `module:Class`."""

CONDITION_KINDS: dict[str, type[ConditionKind]] = {"classes": Classes, "text": Texts}

AnyCondition = Annotated[
    SerializeAsAny[ConditionKind], BeforeValidator(reader_of(CONDITION_KINDS, ConditionKind, "tcm.parts"))
]
"""What a model is conditioned on, read in the same way."""


read_latents = reader_of({"vae": Latents}, Latents, "tcm.parts", usual="vae")
AnyLatents = Annotated[SerializeAsAny[Latents], BeforeValidator(read_latents)]
"""What images are encoded to, read in the same way; without a `kind`, an autoencoder's latents."""


AnyPreconditioning = Annotated[
    SerializeAsAny[Preconditioning],
    BeforeValidator(reader_of(PRECONDITIONINGS, Preconditioning, "tcm.parts")),
]
"""How f is made of the network, read in the same way."""


KNOWS_NULL = "knows_null"
"""In a card's `extra`: true for a model that was trained without its condition too."""

SigmaData = Annotated[float, Field(gt=0, le=1e6)]
LowestTime = Annotated[float, Field(gt=0)]
HighestTime = Annotated[float, Field(gt=0, le=1e6)]


class Provenance(BaseModel):
    """Where a model comes from: a run's recipe, stage and step, or an imported file and its licence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str | None = None
    stage: str | None = None
    step: int | None = None
    data: str | None = Field(default=None, description="hash of the training data; for a stream, its identity")
    imported_from: str | None = None
    licence: str | None = None


class ModelCard(BaseModel):
    """config.json: the network, the method and the times on which the model is defined."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    library: Literal["truncated-consistency"] = "truncated-consistency"
    format: Literal[4] = 4
    kind: str = Field(min_length=1, description="the objective that the model was trained with")
    sampler: AnySampler = Field(description="how the model is sampled")
    network: AnyNetwork
    image_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        description="[channels, height, width] of what the network takes: images or latents"
    )
    latents: AnyLatents | None = Field(default=None, description="what images are encoded to; none: pixels")
    condition: AnyCondition | None = Field(default=None, description="what an image can be conditioned on")
    sigma_data: SigmaData = 0.5
    t_min: LowestTime = 0.002
    t_max: HighestTime = 80.0
    preconditioning: AnyPreconditioning = Field(default=USUAL, description="how f is made of the network")
    uncertainty: int = Field(default=0, ge=0, description="channels of the learned-uncertainty head; 0 for none")
    extra: dict[str, JsonValue] = Field(default={}, description="what the stage that made the model adds")
    provenance: Provenance = Provenance()
    companion: "ModelCard | None" = Field(
        default=None,
        description="the card of the consistency model that takes over at t_min and below; its weights are in "
        "companion.safetensors",
    )

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """[channels, height, width] of the images that people see."""
        return self.image_shape if self.latents is None else self.latents.images_of(self.image_shape)

    @model_validator(mode="before")
    @classmethod
    def _with_sampler(cls, fields: Any) -> Any:
        """The sampler that goes with the kind, if none is given."""
        if not isinstance(fields, dict):
            return fields
        if fields.get("format") in (1, 2, 3):
            raise ValueError(
                f"format={fields['format']} is from before the first release; convert the file with "
                "tools/convert_card.py of the repository"
            )
        return {"sampler": {"kind": "heun" if fields.get("kind") == "diffusion" else "consistency"}} | fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.t_min >= self.t_max:
            raise ValueError(f"t_min={self.t_min} must lie below t_max={self.t_max}")
        if max(prod(self.image_shape), prod(self.picture_shape)) > LARGEST_PICTURE:
            raise ValueError(
                f"image_shape={list(self.image_shape)} makes images of {list(self.picture_shape)}; at most "
                f"{LARGEST_PICTURE:,} values are supported"
            )
        self.network.check_scales(self.sigma_data, self.t_max)
        if (other := self.companion) is None:
            return self
        if other.companion is not None:
            raise ValueError("companion.companion: a companion cannot have a companion of its own")
        if (other.image_shape, other.latents, other.condition) != (self.image_shape, self.latents, self.condition):
            raise ValueError("the companion must have the same image_shape, latents and condition as the model itself")
        if not other.sampler.generates_at_once:
            raise ValueError(f"companion is a {other.sampler.model} model; it must be a consistency model")
        if not other.t_min < self.t_min <= other.t_max:
            raise ValueError(f"companion covers {other.t_min} to {other.t_max}, but must cover t_min={self.t_min}")
        return self

    @property
    def knows_null(self) -> bool:
        """Whether the model was trained without its condition too, as far as its card says."""
        return self.extra.get(KNOWS_NULL) is True

    @property
    def labels(self) -> range:
        """The labels that a model of classes knows: from 0, or from −1, no class."""
        return range(-self.knows_null, self.condition.count) if isinstance(self.condition, Classes) else range(0)

    @property
    def alone(self) -> Self:
        """The card of the model without its companion."""
        return self.model_copy(update={"companion": None})

    def check_alone(self, what: str) -> None:
        """Refuse a companion where `what` holds one network."""
        if self.companion is not None:
            raise TcmError(f"the model has a companion, but {what} can hold only one network; give model.alone")


def read_card(path: Path, trust: Trust = False) -> ModelCard:
    """The card in a config.json."""
    try:
        return ModelCard.model_validate_json(read_regular(path), context=trust)
    except FileNotFoundError as error:
        raise TcmError(f"{path} does not exist; a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}") from error
    except OSError as error:
        raise TcmError(f"{path} cannot be read ({error.strerror}); it should be a text file") from error
    except ValidationError as error:
        raise describe_validation(error, str(path), ModelCard) from error
