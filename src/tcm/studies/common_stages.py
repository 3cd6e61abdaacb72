"""Which variants have a stage in common: those in which all that decides its weights is the same."""

import hashlib
import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from tcm.recipes.changes import resume_rules
from tcm.recipes.lineage import roles_of, source_stage, watched_times, watching_roles
from tcm.recipes.schema import Recipe
from tcm.recipes.tables import TAGS
from tcm.studies.schema import Study, Variant
from tcm.training.stage_models import needed_stages

NOT_DECISIVE = ("name", "adapts", "second_time")
"""Keys of a recipe that no stage's weights depend on."""


def stage_key(recipe: Recipe, name: str) -> str:
    """A stage's name with a hash of all that decides its weights: the same key, the same weights.

    >>> from tcm.recipes.resolve import resolve
    >>> digits, other = resolve("digits"), resolve("digits", ["truncated.rho=0.5", "*.keep=9"])
    >>> [stage_key(digits, name) == stage_key(other, name) for name in digits.stages]
    [True, True, False]
    """
    # Without defaults, so that a new version's keys do not make it another stage; `same_weights` looks at all of them.
    tree = _with_tags(recipe.model_dump(mode="json", exclude_defaults=True), recipe.model_dump(mode="json"))
    text = json.dumps(_decisive(recipe, name, tree), sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def same_weights(recipe: Recipe, other: Recipe, name: str) -> bool:
    """Whether a stage gets the same weights by two recipes, with every default written out."""
    one, two = (_decisive(each, name, each.model_dump(mode="json")) for each in (recipe, other))
    return one == two


def as_noted(recipe: Recipe, noted: Recipe) -> Recipe:
    """A stage's recipe, with what decides nothing as in its folder's: another study may have begun the stage."""
    return recipe.model_copy(update={key: getattr(noted, key) for key in NOT_DECISIVE})


def _decisive(recipe: Recipe, name: str, tree: dict[str, Any]) -> dict[str, Any]:
    free = {key for key, rule in resume_rules(recipe).items() if rule == "free"}
    shared = {key: value for key, value in tree.items() if key not in (*NOT_DECISIVE, "stages")}
    stage = {key: value for key, value in tree["stages"][name].items() if key not in ("baseline", "companion")}
    sources = {key: source_stage(recipe, name, role) for key, role in roles_of(recipe, name).items()}
    return {
        "name": name,  # its randomness depends on it
        "shared": _without(shared, free, ""),
        "stage": _without(stage, free, f"{name}."),
        "sources": {key: source and stage_key(recipe, source) for key, source in sources.items()},
        "watched": _watched(recipe, name),
    }


def _with_tags(some: Any, all_of_it: Any) -> Any:
    """A part of a tree, with the keys that say what kind of thing each of its tables is."""
    if isinstance(some, list):
        return [_with_tags(*pair) for pair in zip(some, all_of_it, strict=True)]
    if not isinstance(some, dict):
        return some
    tags = {tag: all_of_it[tag] for tag in TAGS if tag in all_of_it}
    return {key: _with_tags(value, all_of_it[key]) for key, value in some.items()} | tags


def _without(table: dict[str, Any], keys: set[str], prefix: str) -> dict[str, Any]:
    """A table and those in it without some keys, given by their whole path."""
    return {
        key: _without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in table.items()
        if f"{prefix}{key}" not in keys
    }


def _watched(recipe: Recipe, name: str) -> list[list[float]]:
    """The times at which a stage's denoising is measured, if that decides when it ends or where another begins."""
    roles = watching_roles(recipe, name)
    if not recipe.stages[name].until_flat and not any(role.needs_curves for role in roles):
        return []
    return [watched_times(recipe, name), sorted(role.highest for role in roles if role.highest is not None)]


@dataclass(frozen=True)
class SharedStage:
    """A stage that one or more variants of a seed have in common, with the part of the first one's recipe it needs."""

    key: str
    name: str
    recipe: Recipe
    needs: frozenset[str]
    """The keys of the stages whose models it needs."""


def stages_to_train(study: Study, variant: Variant) -> list[str]:
    """The stages of a variant that are needed to measure it, in order."""
    return with_needed(variant.recipe, {variant.stage, *variant.curves(study)})


def with_needed(recipe: Recipe, names: Set[str]) -> list[str]:
    """These stages and all that they are trained from, in order."""
    while more := {other for name in names for other in needed_stages(recipe, name)} - names:
        names = names | more
    return [name for name in recipe.stages if name in names]


def shared_stages(study: Study, variants: Sequence[Variant]) -> dict[str, SharedStage]:
    """All stages that the variants need, each once, by their keys; what a stage needs comes before it."""
    found: dict[str, SharedStage] = {}
    for variant in variants:
        keys = {name: stage_key(variant.recipe, name) for name in stages_to_train(study, variant)}
        for name, key in keys.items():
            needs = frozenset(keys[other] for other in needed_stages(variant.recipe, name))
            if key not in found:
                found[key] = SharedStage(key, name, _part_for(variant.recipe, name), needs)
    return found


def _part_for(recipe: Recipe, name: str) -> Recipe:
    """The recipe with only the stages that one depends on: nothing else can make it fail."""
    names = {name}
    while more := {other for one in names for other in _related(recipe, one)} - names:
        names |= more
    stages = {one: stage for one, stage in recipe.stages.items() if one in names}
    return recipe.model_copy(update={"stages": stages})


def _related(recipe: Recipe, name: str) -> Iterable[str]:
    """The stages whose models a stage needs, and those whose times decide when it ends."""
    yield from needed_stages(recipe, name)
    if _watched(recipe, name):
        for other in recipe.stages:
            roles = roles_of(recipe, other).values()
            if any(role.watched and source_stage(recipe, other, role) == name for role in roles):
                yield other
