"""Where a stage's models come from: scratch, an earlier stage, the model given with --init, a model folder."""

from collections.abc import Mapping, Set
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import derive_seed
from tcm.foundation.tensors import check_tensors
from tcm.method.conditions import ConditionKind
from tcm.networks import ImageShape
from tcm.recipes.lineage import network_of, roles_of, source_stage, stages_before, trained_roles
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Role
from tcm.weights import Model, ModelCard, Provenance, find, inspect, load
from tcm.weights.card import KNOWS_NULL

ROLES = "roles"
"""The folder, in a stage's, of the models of the other roles that it trains."""
NETWORK, HEAD = "network.", "uncertainty."
"""The prefixes of a denoiser's tensors; a consistency model does not use the uncertainty head."""
NO_INIT = "{} needs the model that the run starts from; give it with --init MODEL"


@dataclass(frozen=True)
class Sources:
    """The models that a recipe's words refer to: those of `earlier` stages, and the one given with --init.

    An earlier stage stands for the folder of its model or, while it is still to come, for the card of that model; so
    does `stage.role`, for the model of another role that the stage trains.
    """

    earlier: Mapping[str, Path | ModelCard]
    init: str | None

    def model(self, key: str, reference: str) -> Model:
        """The model that `reference`, the value of the recipe's `key`, stands for."""
        found = self._find(key, reference)
        assert not isinstance(found, ModelCard), "stages are trained in order"
        return load(found).alone

    def card(self, key: str, reference: str) -> ModelCard:
        """The card of that model; its weights are checked to exist, but not read."""
        found = self._find(key, reference)
        return found if isinstance(found, ModelCard) else inspect(found)

    def _find(self, key: str, reference: str) -> Path | str | ModelCard:
        if reference == "previous":
            if self.earlier:
                return list(self.earlier.values())[-1]
            reference = "init"
        if reference == "init":
            if self.init is None:
                raise TcmError(NO_INIT.format(key))
            return self.init
        return self.earlier.get(reference, reference)


def check_init(recipe: Recipe, done: Set[str], init: str | None) -> None:
    """Refuse a run whose first model is not given or not there, before its data are opened.

    `done` are the stages that do not start any more.
    """
    for name, role in _roles_from_init(recipe):
        if name in done:
            continue
        if init is None:
            raise TcmError(NO_INIT.format(f"{name}.{role.key}"))
        try:
            find(init)
        except TcmError as error:
            raise TcmError(f"--init: {error}") from error


def check_init_is_used(recipe: Recipe, init: str | None) -> None:
    """Refuse a model that is given although no stage takes it."""
    if init is not None and not _roles_from_init(recipe):
        first = next(iter(recipe.stages))
        raise TcmError(
            f"--init={init} has no use: no stage of this recipe takes it; leave it out, or start from it with "
            f"{first}.init=init"
        )


def _roles_from_init(recipe: Recipe) -> list[tuple[str, Role]]:
    """The roles whose model is the one given with --init, each with its stage."""
    roles = [(name, role) for name in recipe.stages for role in roles_of(recipe, name).values()]
    first = next(iter(recipe.stages))
    return [(name, role) for name, role in roles if role.source in ("init", "previous" if name == first else "init")]


def check_run(recipe: Recipe, cards: Mapping[str, ModelCard], done: Mapping[str, Path], init: str | None) -> None:
    """Refuse now what any stage of a run would refuse when it starts: a network, a model.

    `done` has the models of the stages that do not start any more.
    """
    earlier: dict[str, Path | ModelCard] = {}
    for name in recipe.stages:
        if name in done:
            earlier |= models_of_stage(recipe, name, done[name].parent)
            continue
        others: dict[str, ModelCard] = {}
        for key, role in roles_of(recipe, name).items():
            wanted = _role_card(recipe, name, key, cards[name], None)
            with torch.device("meta"):
                fresh = Model.fresh(wanted)
            if role.source != "scratch":
                given = Sources(earlier, init).card(f"{name}.{role.key}", role.source)
                wanted = _role_card(recipe, name, key, cards[name], given)
                _check_role(name, role, given, wanted)
                if role.trained and role.network != "source":
                    with torch.device("meta"):
                        _weights(name, role, Model.fresh(given), fresh)
            if key in trained_roles(recipe, name):
                others[f"{name}.{key}"] = wanted
        earlier |= others | {name: cards[name]}


def models_of_stage(recipe: Recipe, name: str, folder: Path) -> dict[str, Path]:
    """Where a finished stage's models are, by the words that name them in a recipe; the student's comes last."""
    others = {f"{name}.{key}": folder / ROLES / key for key in trained_roles(recipe, name)}
    return others | {name: folder / "model"}


def models_of_run(recipe: Recipe, folders: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Where the models of each stage are or will be, given the stages' folders."""
    return {name: list(models_of_stage(recipe, name, folder).values()) for name, folder in folders.items()}


def stage_models(recipe: Recipe, name: str, card: ModelCard, sources: Sources) -> dict[str, Model]:
    """The models of a stage by their role, each checked to fit."""
    models, roles = {}, roles_of(recipe, name)
    for key, role in roles.items():
        if role.follows is not None:
            continue
        given = None if role.source == "scratch" else sources.model(f"{name}.{role.key}", role.source)
        wanted = _role_card(recipe, name, key, card, None if given is None else given.card)
        if given is not None:
            _check_role(name, role, given.card, wanted)
        if given is None or role.trained:
            models[key] = _fresh(wanted, recipe.seed, name if key == "student" else f"{name}.{key}")
            if given is not None:
                models[key].denoiser.load_state_dict(_weights(name, role, given, models[key]))
        else:
            models[key] = given
    for key, role in roles.items():
        if role.follows is not None:
            models[key] = deepcopy(models[role.follows[0]])
    return {key: models[key] for key in roles}


def sources_before(recipe: Recipe, name: str, folders: Mapping[str, Path], init: str | None = None) -> Sources:
    """What a stage's references stand for, given the folders of the stages before it."""
    earlier: dict[str, Path] = {}
    for other in stages_before(recipe, name):
        earlier |= models_of_stage(recipe, other, folders[other])
    return Sources(earlier, init)


def companion_source(recipe: Recipe, name: str) -> tuple[str, str] | None:
    """The key and the reference of the model that is saved with a stage's: those of the role that it plays."""
    key = recipe.stages[name].companion_role
    if key is None:
        return None
    role = roles_of(recipe, name)[key]
    return f"{name}.{role.key}", role.source


def needed_stages(recipe: Recipe, name: str) -> frozenset[str]:
    """The earlier stages whose models a stage needs.

    >>> from tcm.recipes.resolve import resolve
    >>> sorted(needed_stages(resolve("demo"), "continued"))
    ['consistency', 'diffusion']
    """
    sources = (source_stage(recipe, name, role) for role in roles_of(recipe, name).values())
    return frozenset(source for source in sources if source is not None)


def card_of(recipe: Recipe, name: str, image_shape: ImageShape, condition: ConditionKind | None) -> ModelCard:
    """The card of the model that a stage makes."""
    stage = recipe.stages[name]
    t_min, t_max = stage.domain(recipe)
    fields = {
        "kind": stage.objective,
        "sampler": recipe.network.sampled_by(stage.sampler(recipe.second_time)),
        "network": network_of(recipe, stage),
        "image_shape": image_shape,
        "latents": recipe.latents,
        "condition": condition,
        "sigma_data": recipe.sigma_data,
        "preconditioning": recipe.preconditioning,
        "t_min": t_min,
        "t_max": t_max,
        "provenance": Provenance(recipe=recipe.name, stage=name, step=stage.steps),
    }
    own = stage.card_fields(recipe)
    if condition is not None and stage.null_remedy(name) is None:
        own = own | {"extra": {KNOWS_NULL: True} | own.get("extra", {})}
    return ModelCard.model_validate(fields | own)


def trained_for(steps: int, card: ModelCard) -> ModelCard:
    """The card of a model that was trained for so many steps, which may be fewer than planned."""
    return card.model_copy(update={"provenance": card.provenance.model_copy(update={"step": steps})})


def _fresh(card: ModelCard, seed: int, name: str) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, name, "weights") % 2**63)
        return Model.fresh(card)


def _role_card(recipe: Recipe, name: str, key: str, card: ModelCard, given: ModelCard | None) -> ModelCard:
    """What a role's model must be in a stage that makes the model of this card.

    The student is sampled as the stage says. Another role is what it says, else what it comes from, on the times that
    the stage trains on.
    """
    stage, role = recipe.stages[name], roles_of(recipe, name)[key]
    if role.network == "source" and given is not None:
        own = {"image_shape": card.image_shape, "condition": card.condition, "provenance": card.provenance}
        return given.model_copy(update=own | _said(role))
    fields: dict[str, object] = {"network": network_of(recipe, stage, role)}
    if key != "student":
        t_min, t_max = stage.span(recipe)
        fields |= {"t_min": t_min, "t_max": t_max, "extra": {KNOWS_NULL: True} if role.learns_null else {}}
        if given is not None:
            fields |= {"kind": given.kind, "sampler": given.sampler, "preconditioning": given.preconditioning}
        fields |= _said(role)
    return card.model_copy(update=fields)


def _said(role: Role) -> dict[str, object]:
    """What a role says about the card of its trained model."""
    said = {"kind": role.kind, "sampler": role.sampler}
    return {field: value for field, value in said.items() if value is not None}


def _weights(name: str, role: Role, source: Model, target: Model) -> dict[str, Tensor]:
    """The weights with which a role's model starts: the source's, but for those to reinitialise."""
    own, given = target.denoiser.state_dict(), _renamed(source, target)
    free = {tensor for tensor in own | given if tensor.startswith((HEAD, *role.reinitialize))}
    fitting = {tensor for tensor in free & own.keys() & given.keys() if own[tensor].shape == given[tensor].shape}
    weights = {tensor: given[tensor] for tensor in given if tensor not in free - fitting}
    weights |= {tensor: own[tensor] for tensor in own if tensor in free - fitting}
    shapes = {tensor: weight.shape for tensor, weight in weights.items()}
    check_tensors(target.denoiser, shapes, f"{name}.{role.key}={role.source}")
    return weights


def _renamed(source: Model, target: Model) -> dict[str, Tensor]:
    """The source's weights under the target's names."""
    network = target.denoiser.network.starting_from(source.denoiser.network.state_dict())
    rest = {name: tensor for name, tensor in source.denoiser.state_dict().items() if not name.startswith(NETWORK)}
    return {f"{NETWORK}{name}": tensor for name, tensor in network.items()} | rest


def _check_role(name: str, role: Role, given: ModelCard, wanted: ModelCard) -> None:
    """Refuse a model that cannot play this role, for which the stage needs a model like `wanted`."""
    what = f"{name}.{role.key}={role.source}"
    if role.source_sampler is not None and not isinstance(given.sampler, role.source_sampler):
        raise TcmError(
            f"{what} is a {given.sampler.model} model, but this stage needs a {role.source_sampler.model} model there; "
            f"name another"
        )
    found, needed = (_traits(card, network=not role.reinitialize) for card in (given, wanted))
    for field in needed:
        if found.get(field) != needed[field]:
            raise TcmError(
                f"{what} has {field} {found.get(field)}, but this recipe needs {needed[field]}; make them the same"
            )
    low, high = given.t_min, given.t_max
    if asked := role.missing(low, high):
        raise TcmError(
            f"{what} must cover {asked}, but it is defined only from {low:g} to {high:g}; change one of the two "
            "ranges or "
            f"name another model"
        )


def _traits(card: ModelCard, network: bool) -> dict[str, object]:
    """What two models must share; some keys of a network are free to differ, and its kind comes before the others."""
    traits: dict[str, object] = {}
    if network:
        traits["network.kind"] = card.network.kind
        keys = card.network.model_dump(exclude=set(card.network.free_keys))
        traits |= {f"network.{key}": value for key, value in keys.items()}
    return traits | {field: getattr(card, field) for field in ("condition", "image_shape", "sigma_data")}
