"""What belongs to a stage of a recipe: its network, its models, and the earlier stages that they come from."""

from __future__ import annotations

from dataclasses import asdict
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from tcm.method.conditions import Classes, ConditionKind
from tcm.networks import NetworkConfig
from tcm.recipes.stages import Role, Stage

if TYPE_CHECKING:
    from tcm.recipes.schema import Recipe


def network_of(recipe: Recipe, stage: Stage, role: Role | None = None) -> NetworkConfig:
    """The network of a role, the student's by default: the recipe's, with the stage's dropout where it states one."""
    if role is not None and isinstance(role.network, NetworkConfig):
        return role.network
    if stage.dropout is None:
        return recipe.network
    return recipe.network.model_copy(update={"dropout": stage.dropout})


def condition_of(recipe: Recipe) -> ConditionKind | None:
    """What images of the data must come with; None leaves it to the data."""
    return recipe.condition if recipe.classes is None else Classes(recipe.classes)


def condition_keys(kind: ConditionKind) -> dict[str, Any]:
    """The keys of a recipe for data with this kind of annotation, the inverse of `condition_of`.

    >>> condition_keys(Classes(10))
    {'classes': 10}
    """
    return {"classes": kind.count} if isinstance(kind, Classes) else {"condition": asdict(kind)}


def roles_of(recipe: Recipe, name: str) -> dict[str, Role]:
    """All models of a stage by their role, the student first."""
    stage = recipe.stages[name]
    return {"student": Role("init", stage.init, trained=True)} | stage.roles(recipe)


def stages_before(recipe: Recipe, name: str) -> list[str]:
    """The names of the stages before one, in order."""
    return list(takewhile(lambda other: other != name, recipe.stages))


def trained_roles(recipe: Recipe, name: str) -> list[str]:
    """The roles of a stage besides the student whose weights are trained: each of them leaves a model too."""
    return [key for key, role in roles_of(recipe, name).items() if role.trained and key != "student"]


def source_stage(recipe: Recipe, name: str, role: Role) -> str | None:
    """The earlier stage that a role's model comes from; None for scratch, --init and folders."""
    before = stages_before(recipe, name)
    if role.source == "previous":
        return before[-1] if before else None
    stage, dot, key = role.source.partition(".")
    known = stage in before and (not dot or key in trained_roles(recipe, stage))
    return stage if known else None


def watching_roles(recipe: Recipe, name: str) -> list[Role]:
    """The roles of later stages whose model a stage trains, and whose denoising is measured meanwhile."""
    stages = list(recipe.stages)
    later = stages[stages.index(name) + 1 :]
    roles = [(other, role) for other in later for role in roles_of(recipe, other).values()]
    return [role for other, role in roles if role.watched and source_stage(recipe, other, role) == name]


def watched_times(recipe: Recipe, name: str) -> list[float]:
    """The times at which a stage's denoising is measured while it is trained.

    >>> from tcm.recipes.resolve import resolve
    >>> watched_times(resolve("cifar10"), "consistency"), watched_times(resolve("cifar10"), "truncated")
    ([0.5, 1.0, 2.0], [])
    """
    stage = recipe.stages[name]
    _, high = stage.domain(recipe)
    times = {t for role in watching_roles(recipe, name) for t in role.watched if t <= high}
    return sorted(times) if stage.watched_images else []


def offset_of(recipe: Recipe, name: str) -> int:
    """The steps that a stage's schedule and power averages count before its first.

    >>> from tcm.recipes.resolve import resolve
    >>> offset_of(resolve("imagenet64-s"), "truncated")
    150000
    """
    offset = recipe.stages[name].schedule_offset
    if isinstance(offset, int):
        return offset
    source = source_stage(recipe, name, roles_of(recipe, name)["student"])
    assert source is not None, "a recipe's checks ensure it"
    return offset_of(recipe, source) + recipe.stages[source].steps
