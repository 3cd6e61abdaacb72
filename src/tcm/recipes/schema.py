"""What a run is: data, network, method and stages; a recipe is one frozen value that has been checked as a whole."""

from typing import Self

import torch
from pydantic import model_validator

from tcm.errors import TcmError
from tcm.method.averaging import ConstantDecay, Decay, PowerDecay
from tcm.method.curriculum import Curriculum
from tcm.method.distances import (
    Distance,
    PseudoHuber,
    SquaredL2,
    Weighting,
    inverse_c_out_squared,
    inverse_delta,
    uniform,
)
from tcm.method.objectives import Consistency, Diffusion, Distillation, Objective, Pairs, TruncatedConsistency
from tcm.method.solvers import euler, heun
from tcm.method.times import LogNormal, LogStudentT, TimeDistribution
from tcm.networks import DDPMppConfig, EDM2Config
from tcm.recipes.checks import check_second_time, check_stages, check_whole, source_stage
from tcm.recipes.fields import (
    AverageSpec,
    ConsistencyStage,
    ConstantAverage,
    DataSpec,
    DiffusionStage,
    DistanceSpec,
    GuardSpec,
    LogNormalTimes,
    LogStudentTTimes,
    PairsStage,
    PowerAverage,
    PseudoHuberDistance,
    RecipeFields,
    SquaredL2Distance,
    Stage,
    TimesSpec,
    TruncatedStage,
    time_range,
)

__all__ = [
    "AverageSpec",
    "ConsistencyStage",
    "ConstantAverage",
    "DataSpec",
    "DiffusionStage",
    "DistanceSpec",
    "GuardSpec",
    "LogNormalTimes",
    "LogStudentTTimes",
    "PowerAverage",
    "PseudoHuberDistance",
    "Recipe",
    "SquaredL2Distance",
    "Stage",
    "TimesSpec",
    "TruncatedStage",
    "decay_of",
    "network_of",
    "objective_of",
    "offset_of",
    "time_range",
]


class Recipe(RecipeFields):
    """A whole run: the stages in order, and what they share.

    >>> from tcm.networks import DDPMppConfig
    >>> stage = DiffusionStage(steps=100, batch=64, learning_rate=1e-3, init="scratch")
    >>> recipe = Recipe(name="mine", data=DataSpec(path="digits"), network=DDPMppConfig(), stages={"diffusion": stage})
    >>> objective_of(recipe, recipe.stages["diffusion"]).times
    LogNormal(mean=-1.2, std=1.2, low=0.002, high=80.0)
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_whole(self)
        check_stages(self)
        check_second_time(self)
        for name, stage in self.stages.items():
            check_objective(self, name, stage)
        return self


def network_of(recipe: Recipe, stage: Stage) -> DDPMppConfig | EDM2Config:
    """The network as a stage trains it: with the stage's dropout where it states one."""
    if stage.dropout is None:
        return recipe.network
    return recipe.network.model_copy(update={"dropout": stage.dropout})


def objective_of(recipe: Recipe, stage: Stage) -> Objective:
    """What a stage minimises, in the words of `tcm.method`."""
    times = _times(recipe, stage)
    match stage:
        case DiffusionStage():
            return Diffusion(times, stage.label_dropout)
        case ConsistencyStage():
            curriculum = Curriculum(stage.ratio_base, stage.ratio_every, stage.ratio_limit, stage.ratio_k)
            return Consistency(times, _pairs(stage, curriculum))
        case TruncatedStage():
            pairs = _pairs(stage, Curriculum(d=0, limit=stage.ratio_limit, k=stage.ratio_k))
            return TruncatedConsistency(times, pairs, stage.t_prime, stage.boundary_weight, stage.boundary_fraction)


def check_objective(recipe: Recipe, name: str, stage: Stage) -> None:
    """Build what a stage minimises and draw from its times: what is wrong shows now, not when the stage starts."""
    try:
        objective = objective_of(recipe, stage)
        if isinstance(objective, TruncatedConsistency):
            objective.boundary_count(stage.batch)
    except TcmError as error:
        raise TcmError(f"{name}: {error}") from error
    try:
        _times(recipe, stage).quantile(torch.tensor([0.0, 1.0]))
    except TcmError as error:
        raise TcmError(f"{name}.times: {error}") from error


def decay_of(spec: AverageSpec) -> Decay:
    """How an average of the weights forgets.

    >>> decay_of(PowerAverage(gamma=16.97))
    PowerDecay(gamma=16.97)
    """
    match spec:
        case ConstantAverage():
            return ConstantDecay(spec.decay)
        case PowerAverage():
            return PowerDecay(spec.gamma)


def offset_of(recipe: Recipe, name: str) -> int:
    """The steps that a stage's schedule and power averages count before its first.

    >>> from tcm.recipes.resolve import resolve
    >>> offset_of(resolve("imagenet64-s"), "truncated")
    150000
    """
    offset = recipe.stages[name].schedule_offset
    if isinstance(offset, int):
        return offset
    source = source_stage(recipe, name)
    assert source is not None, "a recipe's checks see to it"
    return offset_of(recipe, source) + recipe.stages[source].steps


def _times(recipe: Recipe, stage: Stage) -> TimeDistribution:
    spec = stage.times
    low, high = time_range(recipe, stage)
    low, high = low if spec.low is None else spec.low, high if spec.high is None else spec.high
    match spec:
        case LogNormalTimes():
            return LogNormal(spec.mean, spec.std, low, high)
        case LogStudentTTimes():
            return LogStudentT(spec.mean, spec.std, low, high, spec.nu)


def _pairs(stage: PairsStage, curriculum: Curriculum) -> Pairs:
    solver = {"euler": euler, "heun": heun}[stage.solver]
    distillation = None if stage.teacher is None else Distillation(solver, stage.guidance)
    weightings: dict[str, Weighting] = {
        "inverse_delta": inverse_delta,
        "inverse_c_out_squared": inverse_c_out_squared,
        "uniform": uniform,
    }
    return Pairs(curriculum, _distance(stage.distance), weightings[stage.weighting], distillation)


def _distance(spec: DistanceSpec) -> Distance:
    match spec:
        case PseudoHuberDistance():
            return PseudoHuber(spec.c)
        case SquaredL2Distance():
            return SquaredL2()
