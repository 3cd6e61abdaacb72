"""The models that take part in a stage, and whose weights move when."""

from dataclasses import dataclass
from typing import Literal

from tcm.method.averaging import Decay
from tcm.method.sampling import Sampler
from tcm.networks import NetworkConfig
from tcm.recipes.stages.optimization import Optimization


@dataclass(frozen=True)
class Rows:
    """Evaluations of a network per image in a step (expected numbers may be fractions): with gradient, without, and
    with a tangent (forward mode). `idle` are calls whose output is not used: another network takes the images.
    """

    gradient: float = 1
    plain: float = 0
    tangent: float = 0
    idle: float = 0


@dataclass(frozen=True)
class Role:
    """A model of a stage: where it comes from, and what it must be.

    `key` is the recipe's key that names its `source`: "scratch", "previous", "init", an earlier stage, another role
    that an earlier stage trained (`stage.role`), or a folder.
    A role that follows another needs neither: it starts from the other's weights.
    """

    key: str = "init"
    source: str = "scratch"
    trained: bool = False
    follows: tuple[str, Decay] | None = None
    """The role of which this one is an average, updated after each of its updates."""
    optimization: Optimization | None = None
    """How its weights are trained; None for the stage's settings."""
    kind: str | None = None
    sampler: Sampler | None = None
    """What a trained role's card says: the objective that it was trained with, and how it is sampled. None: as the
    source's, or as the student's if it starts from scratch.
    """
    learns_null: bool = False
    """Whether a trained role sees the null condition too, so that a later stage can guide it."""
    source_sampler: type[Sampler] | None = None
    """How the source must be sampled: by a HeunSampler if it must be a diffusion model; None for anything."""
    lowest: float | None = None
    highest: float | None = None
    """The times that the stage asks the model for."""
    needs_null: str | None = None
    """Set if the source must know the null condition; names the setting that removes this requirement:
    "guidance=1.0"."""
    watched: tuple[float, ...] = ()
    """Times at which the denoising of its source is measured while an earlier stage trains it; `highest` is among
    them, and is what the source's `until_flat` looks at."""
    needs_curves: str | None = None
    """Set if the stage decides something by what was measured; names the setting that removes this requirement:
    "t_prime=1.0"."""
    network: NetworkConfig | Literal["student", "source"] = "student"
    """Its network: the student's, the source's, or its own."""
    reinitialize: tuple[str, ...] = ()
    """Prefixes of tensors to initialise from scratch instead of copying. With any, the networks need not be the same;
    the uncertainty head may always differ.
    """
    precision: Literal["fp32", "bf16"] = "fp32"
    rows: Rows = Rows(gradient=0)
    """The evaluations of its network in a step, if that is not the student's; the stage's `rows` leave them out."""

    def missing(self, low: float, high: float) -> str | None:
        """The times that the stage asks for, if a model that is defined on [low, high] does not know them all.

        >>> Role("teacher", "init", highest=80.0).missing(0.002, 10.0)
        'times up to 80'
        """
        known = (self.lowest is None or self.lowest >= low) and (self.highest is None or self.highest <= high)
        begin = "" if self.lowest is None else f" from {self.lowest:.4g}"
        end = "" if self.highest is None else f" {'' if begin else 'up '}to {self.highest:.4g}"
        return None if known else f"times{begin}{end}"


@dataclass(frozen=True)
class Turn:
    """An update of one role's weights, made in every `every`-th step; some role's turn comes in every step."""

    role: str = "student"
    every: int = 1
