"""What must hold between a recipe's keys; each message names the key, its value and the remedy."""

import re
from difflib import get_close_matches
from itertools import takewhile
from math import ceil, floor

import torch

from tcm.errors import TcmError
from tcm.method.curriculum import SMALLEST_R, Curriculum
from tcm.networks import check_network
from tcm.recipes.fields import (
    CONTINUE,
    UNSET,
    DiffusionStage,
    PairsStage,
    PowerAverage,
    RecipeFields,
    Stage,
    TruncatedStage,
    time_range,
)

RESERVED_NAMES = {"scratch", "previous", "init", "extends", "order", UNSET}


def check_whole(recipe: RecipeFields) -> None:
    """What concerns more than one stage."""
    if recipe.t_min >= recipe.t_max:
        raise TcmError(f"t_min={recipe.t_min} must lie below t_max={recipe.t_max}")
    if recipe.t_min <= SMALLEST_R:
        raise TcmError(f"t_min={recipe.t_min} must lie above {SMALLEST_R}, the lowest time of a pair; use 0.002")
    for name in recipe.stages:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in RESERVED_NAMES | set(RecipeFields.model_fields):
            raise TcmError(
                f"{name!r} cannot be the name of a stage; use another one of lower-case letters, digits, - and _"
            )
    if recipe.image_shape is not None:
        check_network(recipe.network, recipe.image_shape)
    diffusion = [name for name, stage in recipe.stages.items() if isinstance(stage, DiffusionStage)]
    if recipe.uncertainty and not diffusion:
        raise TcmError(f"uncertainty={recipe.uncertainty} needs a diffusion stage, and there is none; set it to 0")


def check_second_time(recipe: RecipeFields) -> None:
    """The second of two sampling steps must lie where the last model is defined."""
    truncated = [(name, stage) for name, stage in recipe.stages.items() if isinstance(stage, TruncatedStage)]
    low, why = (truncated[-1][1].t_prime, f"{truncated[-1][0]}.t_prime") if truncated else (recipe.t_min, "t_min")
    if not low <= recipe.second_time < recipe.t_max:
        raise TcmError(
            f"second_time={recipe.second_time} must be at least {why}={low} and below t_max={recipe.t_max}, "
            f"where the last model is defined; change one of them"
        )


def check_stages(recipe: RecipeFields) -> None:
    """What concerns one stage and those before it."""
    for name, stage in recipe.stages.items():
        _check_optimisation(name, stage)
        _check_times(recipe, name, stage)
        _check_labels(recipe, name, stage)
        _check_init(recipe, name, stage)
        _check_offset(recipe, name, stage)
        if isinstance(stage, PairsStage):
            _check_teacher(recipe, name, stage)
        if isinstance(stage, TruncatedStage):
            _check_boundary(name, stage)
            _check_frozen(recipe, name, stage)


def stages_before(recipe: RecipeFields, name: str) -> list[str]:
    """The names of the stages before one, in order."""
    return list(takewhile(lambda other: other != name, recipe.stages))


def source_stage(recipe: RecipeFields, name: str) -> str | None:
    """The earlier stage that a stage's weights come from; none if they come from elsewhere."""
    before, init = stages_before(recipe, name), recipe.stages[name].init
    if init == "previous":
        return before[-1] if before else None
    return init if init in before else None


def _check_optimisation(name: str, stage: Stage) -> None:
    if stage.batch % stage.accumulation:
        lower = stage.batch // stage.accumulation * stage.accumulation
        nearest = " or ".join(str(batch) for batch in (lower, lower + stage.accumulation) if batch)
        raise TcmError(
            f"{name}.batch={stage.batch} is not divisible by accumulation={stage.accumulation}; use batch={nearest}"
        )
    if stage.schedule == "inverse_sqrt" and stage.schedule_reference is None:
        raise TcmError(
            f"{name}.schedule='inverse_sqrt' needs schedule_reference, the step after which the learning rate falls; "
            f"add it, such as schedule_reference=2000"
        )
    if stage.schedule == "constant" and stage.schedule_reference is not None:
        raise TcmError(
            f"{name}.schedule_reference={stage.schedule_reference} has no effect on schedule='constant'; "
            f"use schedule='inverse_sqrt' or schedule_reference='{UNSET}'"
        )
    if stage.warmup >= stage.steps:
        raise TcmError(f"{name}.warmup={stage.warmup} must be less than steps={stage.steps}; shorten it")


def _check_times(recipe: RecipeFields, name: str, stage: Stage) -> None:
    if isinstance(stage, TruncatedStage) and not recipe.t_min < stage.t_prime < recipe.t_max:
        raise TcmError(
            f"{name}.t_prime={stage.t_prime} must lie between t_min={recipe.t_min} and t_max={recipe.t_max}; "
            f"the paper uses 1.0"
        )
    low, high = time_range(recipe, stage)
    if not recipe.t_min < high <= recipe.t_max:
        raise TcmError(f"{name}.t_high={high} must lie between t_min={recipe.t_min} and t_max={recipe.t_max}")
    times = stage.times
    for key, value in (("low", times.low), ("high", times.high)):
        if value is not None and not low <= value <= high:
            raise TcmError(
                f"{name}.times.{key}={value} lies outside the stage's range from {low} to {high}; "
                f"set it to '{UNSET}' to use the whole range"
            )
    if times.low is not None and times.high is not None and times.low >= times.high:
        raise TcmError(f"{name}.times.low={times.low} must lie below {name}.times.high={times.high}")


def _check_labels(recipe: RecipeFields, name: str, stage: Stage) -> None:
    if isinstance(stage, DiffusionStage) and stage.label_dropout and not recipe.conditional:
        raise TcmError(
            f"{name}.label_dropout={stage.label_dropout} needs labels; set conditional=true or label_dropout=0.0"
        )
    if isinstance(stage, PairsStage) and stage.guidance != 1:
        if stage.teacher is None:
            raise TcmError(
                f"{name}.guidance={stage.guidance} needs a teacher; name a diffusion stage as teacher or "
                f"set guidance=1.0"
            )
        if not recipe.conditional:
            raise TcmError(f"{name}.guidance={stage.guidance} needs labels; set conditional=true or guidance=1.0")
        teacher = recipe.stages.get(stage.teacher)
        if isinstance(teacher, DiffusionStage) and not teacher.label_dropout:
            raise TcmError(
                f"{name}.guidance={stage.guidance} needs a teacher that also knows images without a label; "
                f"set {stage.teacher}.label_dropout=0.1 or guidance=1.0"
            )


def _check_init(recipe: RecipeFields, name: str, stage: Stage) -> None:
    before = stages_before(recipe, name)
    if stage.init == "previous":
        return
    if stage.init != "scratch":
        _check_reference(recipe, name, "init", stage.init, [*before, "previous", "scratch"])
    elif isinstance(stage, TruncatedStage) and not before:
        raise TcmError(
            f"{name}.init='scratch': a truncated stage goes on from a consistency model; put a consistency stage "
            f"before it, or use init='previous' and give a model with --init"
        )


def _check_offset(recipe: RecipeFields, name: str, stage: Stage) -> None:
    if stage.schedule_offset == 0:
        return
    if stage.schedule == "constant" and not any(isinstance(average, PowerAverage) for average in stage.averages):
        raise TcmError(
            f"{name}.schedule_offset={stage.schedule_offset!r} has no effect on schedule='constant' and constant "
            f"averages; remove it, or use schedule='inverse_sqrt' or a power average"
        )
    if stage.schedule_offset == CONTINUE and source_stage(recipe, name) is None:
        raise TcmError(
            f"{name}.schedule_offset='{CONTINUE}' counts on from an earlier stage, and init={stage.init!r} names none; "
            f"give the number of steps that the model was trained for, such as schedule_offset=150000"
        )


def _check_teacher(recipe: RecipeFields, name: str, stage: PairsStage) -> None:
    if stage.teacher is None or stage.teacher == "init":
        return
    diffusion = [other for other in stages_before(recipe, name) if isinstance(recipe.stages[other], DiffusionStage)]
    _check_reference(recipe, name, "teacher", stage.teacher, [*diffusion, "init", UNSET])


def _check_boundary(name: str, stage: TruncatedStage) -> None:
    if floor(stage.batch * stage.boundary_fraction + 1e-9) == 0:
        smallest = ceil(1 / stage.boundary_fraction - 1e-9)
        raise TcmError(
            f"{name}.boundary_fraction={stage.boundary_fraction} of batch={stage.batch} leaves no boundary sample, "
            f"and training would collapse; use batch={smallest} or more, or a larger boundary_fraction"
        )


def _check_frozen(recipe: RecipeFields, name: str, stage: TruncatedStage) -> None:
    before = stages_before(recipe, name)
    source = before[-1] if stage.frozen == "previous" and before else stage.frozen
    if source == "previous":
        return
    consistency = [other for other in before if isinstance(recipe.stages[other], PairsStage)]
    if stage.frozen == "previous" and source not in consistency:
        raise TcmError(
            f"{name}.frozen='previous' is the {recipe.stages[source].objective} stage {source!r}, and a consistency "
            f"model is needed below t_prime; put a consistency stage before {name!r}"
        )
    _check_reference(recipe, name, "frozen", source, [*consistency, "previous"])
    frozen = recipe.stages.get(source)
    if frozen is None:
        return
    t_prime = torch.tensor(stage.t_prime, dtype=torch.float64)
    delta = Curriculum(d=0, limit=stage.ratio_limit, k=stage.ratio_k).delta(t_prime, 0)
    lowest = float(t_prime - delta)
    low, high = time_range(recipe, frozen)
    if not low <= lowest < stage.t_prime <= high:
        raise TcmError(
            f"{name}.t_prime={stage.t_prime} asks the frozen stage {source!r} for times from {lowest:.4g} to "
            f"{stage.t_prime}, and it is defined from {low} to {high}; change t_prime or frozen"
        )


def _check_reference(recipe: RecipeFields, name: str, key: str, value: str, choices: list[str]) -> None:
    """A name without a slash must be one of the choices."""
    if value in choices or "/" in value or "\\" in value:
        return
    one_of = f"use one of: {', '.join(choices)}"
    if value in stages_before(recipe, name):
        kind = recipe.stages[value].objective
        raise TcmError(f"{name}.{key}={value!r} is a {kind} stage, which cannot be a {key} model; {one_of}")
    if value in recipe.stages:
        raise TcmError(f"{name}.{key}={value!r} does not come before {name!r}; {one_of}")
    near = get_close_matches(value, choices, 1)
    advice = f"did you mean {near[0]!r}?" if near else one_of
    raise TcmError(f"{name}.{key}={value!r} is no earlier stage; {advice} (a model folder needs a slash: ./{value})")
