"""What a run is: the stages in order, and what they share; each key checked by itself and with the others."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import Any, Literal, Self

import torch
from pydantic import Field, ValidationInfo, model_validator

from tcm.data.opening import check_class
from tcm.foundation.errors import TcmError
from tcm.method.curriculum import SMALLEST_R
from tcm.method.sampling import Sampler
from tcm.networks import NetworkConfig
from tcm.recipes.lineage import (
    network_of,
    roles_of,
    source_stage,
    stages_before,
    trained_roles,
    watched_times,
    watching_roles,
)
from tcm.recipes.stages import AnyStage, Role, Setting, Spec, Stage
from tcm.recipes.stages.base import CONTINUE
from tcm.recipes.stages.optimization import Count, on_resume
from tcm.weights.card import AnyCondition, AnyLatents

RESERVED_NAMES = {"scratch", "previous", "init", "extends", "order", "none"}


class DataSpec(Spec):
    """The images to learn from."""

    path: str = Field(
        description='a file, folder or name of a data set ("digits" is bundled), or your own class, module:Class; '
        "prefix with `stream:` to read it sequentially",
        json_schema_extra=on_resume("same content"),
    )
    flip: bool = Field(default=False, description="mirror half of the images")
    channels: Literal[1, 3] | None = Field(
        default=None, description="convert to 1 (grey) or 3 (RGB); unset: as they are"
    )
    workers: int = Field(
        default=0,
        ge=0,
        description="processes (for a stream: threads) that read images ahead; 0: the training process",
        json_schema_extra=on_resume("free"),
    )
    lanes: Count = Field(
        default=8, description="shards of a stream that are read side by side; the processes share them evenly"
    )
    window: Count = Field(default=4096, description="images of a stream that are shuffled together")

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        check_class("path", self.path, info.context or False)
        return self


def _default_second_time(fields: dict[str, Any]) -> float:
    """1, or where the last of the ranges begins; half of where sampling starts if that is not above 1."""
    setting, stages = Setting.model_construct(**{key: fields[key] for key in Setting.model_fields}), fields["stages"]
    starts = [start for stage in stages.values() if (start := stage.start(setting)) is not None]
    usual = 1.0 if min(starts, default=inf) > 1 else min(starts) / 2
    return max([usual, *(stage.span(setting)[0] for stage in stages.values())])


class Recipe(Setting):
    """A whole run: the stages in order, and what they share.

    >>> from tcm.networks import DDPMppConfig
    >>> from tcm.recipes.stages.diffusion import DiffusionStage
    >>> stage = DiffusionStage(steps=100, batch=64, learning_rate=1e-3, init="scratch")
    >>> recipe = Recipe(name="mine", data=DataSpec(path="digits"), network=DDPMppConfig(), stages={"diffusion": stage})
    >>> stage.build(recipe).times.span
    (0.002, 80.0)
    """

    name: str = Field(min_length=1, description="name of the recipe; unset in a file: the file's name")
    seed: int = Field(default=0, ge=0, description="seed of all randomness")
    threads: Literal["auto"] | Count = Field(
        default="auto",
        description="threads of a CPU; auto: the number that is measured to be best, unless OMP_NUM_THREADS is set",
        json_schema_extra=on_resume("free"),
    )
    data: DataSpec = Field(description="the images")
    image_shape: tuple[Count, Count, Count] | None = Field(
        default=None, description="[channels, height, width] that the data must have; unset: whatever the data has"
    )
    latents: AnyLatents | None = Field(
        default=None,
        description="what the images are encoded to before the network sees them: a table whose vae is the folder or "
        "hub id of an autoencoder or its pipeline; image_shape is then the latents'. Unset: pixels",
    )
    classes: Count | None = Field(
        default=None, description="number of classes that the data must have; unset: whatever the data has"
    )
    condition: AnyCondition | None = Field(
        default=None,
        description="what the data must be annotated with, if not with classes: a table with its kind, such as "
        "module:Class, and fields; unset: whatever the data has",
    )
    adapts: bool = Field(
        default=False,
        description="whether to take image_shape, classes and sigma_data from the run's data",
    )
    stages: dict[str, AnyStage] = Field(min_length=1, description="the stages, in order, each under its name")
    second_time: float = Field(
        default_factory=_default_second_time,
        description="time of the second of two sampling steps; not given: 1, or the last t_prime if that is higher",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_whole(self)
        for name, stage in self.stages.items():
            stage.check(name, self)
            _build(self, name, stage)
            _check_turns(self, name)
            for key, role in roles_of(self, name).items():
                _check_role(self, name, role)
                _check_dropout(name, network_of(self, stage, role))
                if role.optimization is not None:
                    role.optimization.check_optimization(f"{name}: {key}", stage.steps)
            _check_offset(self, name, stage)
            _check_watching(self, name, stage)
        for name, stage in self.stages.items():  # last: a stage's own errors come before those of its sampler
            if stage.start(self) is not None:
                stage.sampler(self.second_time).check_range(name, *stage.covered(self))
        return self


def _check_watching(recipe: Recipe, name: str, stage: Stage) -> None:
    """What a run decides by itself needs an earlier stage that is watched."""
    if stage.until_flat and not watched_times(recipe, name):
        needed = (
            "watched_images above 0" if watching_roles(recipe, name) else "a later stage that keeps its model frozen"
        )
        raise TcmError(f"{name}.until_flat=true needs {needed}; add it, or give a number of steps and until_flat=false")
    for role in roles_of(recipe, name).values():
        source = source_stage(recipe, name, role)
        if role.needs_curves is None or (source is not None and watched_times(recipe, source)):
            continue
        model = "comes from outside of this run" if source is None else f"is not watched ({source}.watched_images=0)"
        raise TcmError(
            f"{name}: {role.needs_curves.partition('=')[0]}='auto' is chosen by what is measured while the "
            f"{role.key} model is trained, but {role.key}={role.source!r} {model}; set {name}.{role.needs_curves}"
        )


def _check_offset(recipe: Recipe, name: str, stage: Stage) -> None:
    if stage.schedule_offset == CONTINUE and source_stage(recipe, name, roles_of(recipe, name)["student"]) is None:
        raise TcmError(
            f"{name}.schedule_offset='{CONTINUE}' continues the count of an earlier stage, but init={stage.init!r} is "
            "not one; give the number of steps that the model was trained for, such as schedule_offset=150000"
        )


def _build(recipe: Recipe, name: str, stage: Stage) -> None:
    """Build the objective and its table of times: what the method refuses, a recipe cannot hold."""
    low, high = stage.span(recipe)
    if not recipe.t_min <= low < high <= recipe.t_max:
        raise TcmError(
            f"{name} trains on times from {low:g} to {high:g}, which must lie between t_min={recipe.t_min:g} and "
            f"t_max={recipe.t_max:g}; change one of them"
        )
    start = stage.start(recipe)
    if start is not None and not low < start <= recipe.t_max:
        raise TcmError(
            f"{name} starts sampling at {start:g}, which must lie above {low:g}, where its range begins, and not above "
            f"t_max={recipe.t_max:g}; change one of them"
        )
    try:
        times = stage.build(recipe).times
    except TcmError as error:
        raise TcmError(f"{name}: {error}") from error
    if times is None:
        return
    for key, value in zip(("low", "high"), times.span, strict=True):
        if not low <= value <= high:
            raise TcmError(
                f"{name}.times.{key}={value} lies outside the stage's range from {low:g} to {high:g}; set it to 'none' "
                f"to use the whole range"
            )
    try:
        times.quantile(torch.zeros(1))
    except TcmError as error:
        raise TcmError(f"{name}.times: {error}") from error


def _check_whole(recipe: Recipe) -> None:
    """What concerns more than one stage."""
    if recipe.t_min >= recipe.t_max:
        raise TcmError(f"t_min={recipe.t_min} must lie below t_max={recipe.t_max}")
    if recipe.t_min <= SMALLEST_R:
        raise TcmError(f"t_min={recipe.t_min} must lie above {SMALLEST_R}, the lowest time of a pair; use 0.002")
    for name in recipe.stages:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in RESERVED_NAMES | set(Recipe.model_fields):
            raise TcmError(
                f"{name!r} is not a valid stage name; use lower-case letters, digits, - and _, and no reserved word"
            )
    if recipe.classes is not None and recipe.condition is not None:
        raise TcmError(f"classes={recipe.classes} and condition={recipe.condition} cannot both be given; give one")
    recipe.network.check_scales(recipe.sigma_data, recipe.t_max)
    if recipe.image_shape is not None:
        recipe.network.check(recipe.image_shape)
    if recipe.uncertainty and not any(stage.card_fields(recipe).get("uncertainty") for stage in recipe.stages.values()):
        raise TcmError(
            f"uncertainty={recipe.uncertainty} needs a stage that learns it, such as diffusion; add one or set it to 0"
        )


def _check_turns(recipe: Recipe, name: str) -> None:
    """In each step some role that is trained must have its turn."""
    turns, roles = recipe.stages[name].turns(), roles_of(recipe, name)
    for turn in turns:
        if turn.role not in roles or not roles[turn.role].trained:
            raise TcmError(
                f"{name}: turns name {turn.role!r}, which is not a trained role; give it trained=True or remove its "
                "turn"
            )
    for key, role in roles.items():
        if role.follows is not None and (role.follows[0] not in roles or roles[role.follows[0]].follows is not None):
            raise TcmError(
                f"{name}: {key} follows {role.follows[0]!r}, which does not have its own weights; name a role that does"
            )
    if all(turn.every != 1 for turn in turns):
        raise TcmError(
            f"{name}: turns={[turn.every for turn in turns]} leave step 1 without a turn; give one of them every=1"
        )


def _check_dropout(name: str, network: NetworkConfig) -> None:
    if network.dropout and not network.replays_dropout:
        raise TcmError(
            f"{name}: dropout={network.dropout:g} needs a network that takes dropout masks, but network.kind="
            f"{network.kind!r} does not; set dropout=0.0"
        )


def _check_role(recipe: Recipe, name: str, role: Role) -> None:
    """A role's model must be known, and be of the right kind where an earlier stage makes it."""
    before = stages_before(recipe, name)
    offers = {word: offer for other in before for word, offer in _offers(recipe, other).items()}
    wanted = role.source_sampler or Sampler
    fitting = [word for word, offer in offers.items() if offer.sampler is None or isinstance(offer.sampler, wanted)]
    previous = ["previous"] if not before or before[-1] in fitting else []
    choices = [*fitting, *previous, "init", *(["scratch"] if role.trained or role.follows else [])]
    source = before[-1] if role.source == "previous" and before else role.source
    if source not in offers:
        _check_name(recipe, name, role, choices)
        return
    offer = offers[source]
    if role.needs_null and offer.null_remedy:
        raise TcmError(
            f"{name}.{role.needs_null.partition('=')[0]} needs a {role.key} that was also trained without conditions; "
            f"{offer.null_remedy} or {name}.{role.needs_null}"
        )
    if source not in fitting:
        raise TcmError(
            f"{name}.{role.key}={role.source!r} is {offer.what}, which cannot provide the "
            f"{role.key} model; {'' if fitting else f'put a stage that makes one before {name!r}, or '}"
            f"use one of: {', '.join(choices)}"
        )
    if offer.domain is not None and (asked := role.missing(*offer.domain)):
        low, high = offer.domain
        raise TcmError(
            f"{name}.{role.key}={role.source!r} must cover {asked}, but {offer.what} is defined only "
            f"from {low:g} to {high:g}; change one of the two ranges or name another model"
        )


@dataclass(frozen=True)
class _Offer:
    """A model that an earlier stage leaves. What its card takes from a folder or --init is not known before a run."""

    what: str
    sampler: Sampler | None
    domain: tuple[float, float] | None
    null_remedy: str | None


def _offers(recipe: Recipe, name: str) -> dict[str, _Offer]:
    """The models of a stage, by the words that name them in a recipe: its student's, then `stage.role`."""
    stage = recipe.stages[name]
    own = stage.sampler(recipe.second_time)
    offers = {name: _Offer(f"the {stage.objective} stage {name!r}", own, stage.domain(recipe), stage.null_remedy(name))}
    for key in trained_roles(recipe, name):
        role = roles_of(recipe, name)[key]
        offers[f"{name}.{key}"] = _Offer(
            f"the {key} of the stage {name!r}",
            role.sampler or (own if role.source == "scratch" else _source_sampler(recipe, name, role)),
            None if role.network == "source" else stage.span(recipe),
            None if role.learns_null else "name another model",
        )
    return offers


def _source_sampler(recipe: Recipe, name: str, role: Role) -> Sampler | None:
    """How a role's source is sampled; None where only its card says so."""
    source = source_stage(recipe, name, role)
    if source is None:
        return None
    return _offers(recipe, source)[source if role.source == "previous" else role.source].sampler


def _check_name(recipe: Recipe, name: str, role: Role, choices: list[str]) -> None:
    """A source without a slash must be one of the choices."""
    value, key = role.source, role.key
    if value in choices or "/" in value or "\\" in value:
        return
    one_of = f"use one of: {', '.join(choices)}"
    if value in recipe.stages:
        raise TcmError(f"{name}.{key}={value!r} does not come before {name!r}; {one_of}")
    near = get_close_matches(value, choices, 1)
    advice = f"did you mean {near[0]!r}?" if near else one_of
    raise TcmError(
        f"{name}.{key}={value!r} is not an earlier stage; {advice} (a model folder needs a slash: ./{value})"
    )
