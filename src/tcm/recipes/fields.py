"""The keys of a recipe: what a run and its stages are made of."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tcm.networks import NetworkConfig

T = TypeVar("T")

UNSET = "none"
"""How TOML, which has no null, says that an optional key is not set."""


def _unset(value: object) -> object:
    return None if value == UNSET else value


Maybe = Annotated[T | None, BeforeValidator(_unset)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


CONTINUE: Literal["continue"] = "continue"
"""The schedule_offset of a stage that counts its steps on from those of the stage that it starts from."""


def _offset(value: object) -> object:
    if value == CONTINUE or (type(value) is int and value >= 0):
        return value
    raise ValueError(f'must be a number of steps, 0 or more, or "{CONTINUE}"')


Offset = Annotated[int | Literal["continue"], BeforeValidator(_offset)]

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


class Spec(BaseModel):
    """A part of a recipe: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LogNormalTimes(Spec):
    """ln t ~ N(mean, std²), truncated to [low, high]."""

    kind: Literal["lognormal"] = Field(default="lognormal", description="a normal distribution of ln t")
    mean: float = Field(description="centre of ln t")
    std: Positive = Field(description="scale of ln t")
    low: Maybe[Positive] = Field(default=None, description="lowest time; unset: where the stage's range begins")
    high: Maybe[Positive] = Field(default=None, description="highest time; unset: where the stage's range ends")


class LogStudentTTimes(Spec):
    """ln t = mean + std z with z ~ Student-t(nu), truncated to [low, high]."""

    kind: Literal["logstudentt"] = Field(default="logstudentt", description="Student's t distribution of ln t")
    mean: float = Field(description="centre of ln t")
    std: Positive = Field(description="scale of ln t")
    nu: Positive = Field(description="degrees of freedom ν; a small one is nearly uniform in ln t")
    low: Maybe[Positive] = Field(default=None, description="lowest time; unset: where the stage's range begins")
    high: Maybe[Positive] = Field(default=None, description="highest time; unset: where the stage's range ends")


TimesSpec = Annotated[LogNormalTimes | LogStudentTTimes, Field(discriminator="kind")]


class PseudoHuberDistance(Spec):
    """d(x, y) = √(‖x − y‖² + c²) − c."""

    kind: Literal["pseudo_huber"] = Field(default="pseudo_huber", description="√(‖x − y‖² + c²) − c over all pixels")
    c: Positive = Field(description="where the distance turns from quadratic to linear")


class SquaredL2Distance(Spec):
    """d(x, y) = ‖x − y‖²."""

    kind: Literal["squared_l2"] = Field(default="squared_l2", description="‖x − y‖² over all pixels")


DistanceSpec = Annotated[PseudoHuberDistance | SquaredL2Distance, Field(discriminator="kind")]


class ConstantAverage(Spec):
    """An average of the weights with a constant decay."""

    kind: Literal["constant"] = Field(default="constant", description="β = decay at every step")
    decay: Fraction = Field(default=0.9999, description="how much of the average a step keeps")


class PowerAverage(Spec):
    """An average of the weights that forgets in proportion to the training's length."""

    kind: Literal["power"] = Field(default="power", description="β = (1 − 1/i)^(gamma + 1) at step i")
    gamma: Positive = Field(default=6.94, description="exponent γ; 6.94 is a relative width of 0.10")


AverageSpec = Annotated[ConstantAverage | PowerAverage, Field(discriminator="kind")]


class GuardSpec(Spec):
    """What happens at a non-finite loss or a gradient far beyond its running scale."""

    on: bool = Field(default=True, description="skip such updates, go back to a checkpoint if they persist")
    spike: float = Field(
        default=20.0, gt=1, description="a gradient norm above this multiple of its running value is a spike"
    )
    patience: int = Field(default=10, ge=1, description="skips in a row before going back to the last good checkpoint")
    retries: int = Field(default=3, ge=0, description="times to go back, each with other noise, before the run stops")


class StageBase(Spec):
    """What all stages share."""

    steps: int = Field(gt=0, description="optimiser steps")
    batch: int = Field(gt=0, description="images per step, over all processes and micro-batches")
    accumulation: int = Field(default=1, ge=1, description="micro-batches per step; the result does not depend on it")
    optimizer: Literal["radam", "adam", "adamw"] = Field(default="radam", description="optimiser")
    learning_rate: Positive = Field(description="learning rate; with inverse_sqrt, that of the first steps")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="decay of the optimiser's two moments")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    schedule: Literal["constant", "inverse_sqrt"] = Field(
        default="constant",
        description="learning rate over steps i; inverse_sqrt: divided by √max(i/schedule_reference, 1)",
    )
    schedule_reference: Maybe[Count] = Field(default=None, description="step after which inverse_sqrt begins to fall")
    schedule_offset: Offset = Field(
        default=0,
        description="steps that inverse_sqrt and power averages count before this stage's first; "
        "continue: those of the stage that the weights come from",
    )
    warmup: int = Field(default=0, ge=0, description="steps over which the learning rate rises from 0")
    averages: tuple[AverageSpec, ...] = Field(
        default=(ConstantAverage(),),
        min_length=1,
        description="averages of the weights; the model folder holds the first",
    )
    precision: Precision = Field(
        default="fp32",
        description="precision of the network's arithmetic; fp32 is IEEE's, fp16 comes with dynamic loss scaling",
    )
    accept_noise: bool = Field(
        default=False, description="train although the precision's rounding drowns the gradient or the pairs"
    )
    clip: Maybe[Positive] = Field(default=None, description="largest gradient norm; a larger one is scaled down to it")
    compile: bool = Field(default=False, description="compile the network with torch.compile")
    dropout: Maybe[Fraction] = Field(default=None, description="dropout in this stage; unset: the network's")
    init: str = Field(
        default="previous",
        description="where the weights come from: scratch, previous (the stage before; in the first stage --init), "
        "an earlier stage, or a model folder (with a slash)",
    )
    log_every: int = Field(default=50, gt=0, description="steps between lines of metrics.jsonl")
    checkpoint_every: int = Field(default=1000, gt=0, description="steps between checkpoints")
    keep: int = Field(default=2, ge=1, description="checkpoints that are kept")
    sample_every: int = Field(default=1000, ge=0, description="steps between sample grids; 0 for none")
    guard: GuardSpec = Field(default=GuardSpec(), description="what happens when training blows up")


class DiffusionStage(StageBase):
    """Stage 0: denoising, as EDM and EDM2 train."""

    objective: Literal["diffusion"] = Field(default="diffusion", description="denoising score matching, EDM's loss")
    times: TimesSpec = Field(
        default=LogNormalTimes(mean=-1.2, std=1.2), description="distribution of the training times"
    )
    label_dropout: Fraction = Field(default=0.0, description="probability that a label is hidden, for guidance")


class PairsStage(StageBase):
    """What both consistency stages share: how neighbouring points of a trajectory are made and compared."""

    ratio_limit: float = Field(
        default=0.999, gt=0, lt=1, description="highest ratio r/t of a pair's times, for large t"
    )
    ratio_k: float = Field(default=8.0, ge=0, description="k in Δ = t (1 − ratio) (1 + k sigmoid(−t))")
    distance: DistanceSpec = Field(default=PseudoHuberDistance(c=1e-8), description="distance between the two outputs")
    weighting: Literal["inverse_delta", "inverse_c_out_squared", "uniform"] = Field(
        default="inverse_delta", description="weight of a pair: 1/Δ, 1/c_out² or 1"
    )
    teacher: Maybe[str] = Field(
        default=None,
        description="diffusion model to distil from: an earlier stage, a model folder (with a slash), or init for "
        "the model given with --init; unset: training from data",
    )
    solver: Literal["euler", "heun"] = Field(default="heun", description="how the teacher's trajectory is followed")
    guidance: float = Field(default=1.0, ge=0, description="the teacher's guidance scale; 1 for none")


class ConsistencyStage(PairsStage):
    """Stage 1: consistency training, or distillation, on the whole range of times."""

    objective: Literal["consistency"] = Field(default="consistency", description="consistency on [t_min, t_high]")
    times: TimesSpec = Field(
        default=LogNormalTimes(mean=-1.1, std=2.0), description="distribution of the training times"
    )
    t_high: Maybe[Positive] = Field(default=None, description="where the stage's range ends; unset: at t_max")
    ratio_base: float = Field(default=2.0, gt=1, description="q in ratio = min(1 − q^−⌈i/ratio_every⌉, ratio_limit)")
    ratio_every: int = Field(default=25_000, gt=0, description="steps after which the ratio tightens")


class TruncatedStage(PairsStage):
    """Stage 2: truncated consistency on [t_prime, t_max]; the ratio is at its limit from the first step."""

    objective: Literal["truncated"] = Field(default="truncated", description="consistency on [t_prime, t_max]")
    times: TimesSpec = Field(
        default=LogStudentTTimes(mean=0.0, std=0.2, nu=0.01), description="distribution of the training times"
    )
    t_prime: Positive = Field(default=1.0, description="t', the dividing time, where the frozen model gives the target")
    boundary_weight: float = Field(default=0.1, ge=0, description="w_b, weight of the boundary loss")
    boundary_fraction: float = Field(
        default=0.25, ge=1e-6, lt=1, description="ρ, share of the batch that sits at t_prime"
    )
    frozen: str = Field(
        default="previous",
        description="the consistency model below t_prime: previous (the stage before; in the first stage --init), "
        "an earlier stage, or a model folder (with a slash)",
    )
    frozen_precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="precision in which the frozen model's weights are stored"
    )


Stage = Annotated[DiffusionStage | ConsistencyStage | TruncatedStage, Field(discriminator="objective")]


class DataSpec(Spec):
    """The images to learn from."""

    path: str = Field(
        description='a file, folder or name of a data set ("digits" is bundled); `stream:` before it reads it in order'
    )
    flip: bool = Field(default=False, description="mirror half of the images")
    channels: Maybe[Literal[1, 3]] = Field(
        default=None, description="convert to 1 (grey) or 3 (RGB); unset: as they are"
    )
    workers: int = Field(
        default=0, ge=0, description="processes (for a stream: threads) that read images ahead; 0: the training process"
    )
    lanes: Count = Field(
        default=8, description="shards of a stream that are read side by side; the processes share them evenly"
    )
    window: Count = Field(default=4096, description="images of a stream that are shuffled together")


def _default_second_time(fields: dict[str, Any]) -> float:
    truncated = [stage.t_prime for stage in fields["stages"].values() if isinstance(stage, TruncatedStage)]
    return max([1.0, *truncated[-1:]])


class RecipeFields(Spec):
    """A recipe's keys, each checked by itself; `tcm.recipes.schema.Recipe` also checks them together."""

    name: str = Field(min_length=1, description="name of the recipe; unset in a file: the file's name")
    seed: int = Field(default=0, ge=0, description="seed of all randomness")
    data: DataSpec = Field(description="the images")
    network: NetworkConfig = Field(description="the network")
    sigma_data: Positive = Field(default=0.5, description="standard deviation of the data in [−1, 1]")
    t_min: Positive = Field(default=0.002, description="lowest noise level")
    t_max: float = Field(default=80.0, gt=0, le=1e6, description="highest noise level T, where sampling begins")
    conditional: bool = Field(default=False, description="whether the network is told the data set's labels")
    uncertainty: int = Field(
        default=0, ge=0, description="channels of EDM2's learned uncertainty in diffusion stages; 0: none"
    )
    image_shape: Maybe[tuple[Count, Count, Count]] = Field(
        default=None, description="[channels, height, width] that the data must have; unset: as the data has"
    )
    classes: Maybe[Count] = Field(
        default=None, description="number of classes that the data must have; unset: as the data has"
    )
    stages: dict[str, Stage] = Field(min_length=1, description="the stages, in order, each under its name")
    second_time: Positive = Field(
        default_factory=_default_second_time,
        description="time of the second of two sampling steps; not given: 1, or the last t_prime if that is higher",
    )


def time_range(recipe: RecipeFields, stage: Stage) -> tuple[float, float]:
    """The times [low, high] that a stage trains on, and on which its model is defined."""
    match stage:
        case DiffusionStage():
            return recipe.t_min, recipe.t_max
        case ConsistencyStage():
            return recipe.t_min, recipe.t_max if stage.t_high is None else stage.t_high
        case TruncatedStage():
            return stage.t_prime, recipe.t_max
