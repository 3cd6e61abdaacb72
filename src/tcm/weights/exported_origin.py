"""What an exported file says of the model that it was: all that the reference's own arguments do not."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tcm.foundation.errors import TcmError
from tcm.method.conditions import Classes
from tcm.method.sampling import ConsistencySampler, HeunSampler, Sampler
from tcm.weights.card import HighestTime, LowestTime, ModelCard, Provenance

ORIGIN_KEY = "truncated_consistency"
"""Its key in a safetensors file's metadata."""


class Origin(BaseModel):
    """The parts of a model's card that its weights and the reference's arguments lack; plain values only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str = Field(min_length=1, max_length=100)
    t_min: LowestTime
    t_max: HighestTime
    second_time: float | None = Field(default=None, description="none for a diffusion model")
    class_names: tuple[str, ...] = ()
    provenance: Provenance = Provenance()

    @property
    def sampler(self) -> Sampler:
        return HeunSampler() if self.second_time is None else ConsistencySampler(second_time=self.second_time)


def origin_of(card: ModelCard) -> Origin | None:
    """What to write for a model; nothing for one with a sampler from outside this package."""
    # The format is fixed: it has room for these two samplers and for classes.
    if not isinstance(card.sampler, ConsistencySampler | HeunSampler):
        return None
    return Origin(
        kind=card.kind,
        t_min=card.t_min,
        t_max=card.t_max,
        second_time=card.sampler.second_time if isinstance(card.sampler, ConsistencySampler) else None,
        class_names=card.condition.names if isinstance(card.condition, Classes) else (),
        provenance=card.provenance,
    )


def read_origin(metadata: Mapping[str, str], path: Path) -> Origin | None:
    """What an export of ours says in its metadata; None for anybody else's file."""
    if ORIGIN_KEY not in metadata:
        return None
    try:
        return Origin.model_validate_json(metadata[ORIGIN_KEY])
    except ValidationError as error:
        raise TcmError(f"{path}: its metadata {ORIGIN_KEY!r} is damaged; export the model again") from error
