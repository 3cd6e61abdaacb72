"""Where a stage's models come from: scratch, an earlier stage, the model given with --init, a model folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tcm.errors import TcmError
from tcm.method.objectives import TruncatedConsistency
from tcm.method.streams import derive_seed
from tcm.recipes.checks import stages_before
from tcm.recipes.fields import DiffusionStage, PairsStage, Stage, TruncatedStage, time_range
from tcm.recipes.schema import Recipe, network_of, objective_of
from tcm.weights import Model, ModelCard, Provenance, inspect, load

Role = Literal["init", "frozen", "teacher"]


@dataclass(frozen=True)
class Sources:
    """The models that a recipe's words refer to: those of `earlier` stages, and the one given with --init.

    An earlier stage stands for the folder of its model or, while it is still to come, for the card of that model.
    """

    earlier: Mapping[str, Path | ModelCard]
    init: str | None

    def model(self, key: str, reference: str) -> Model:
        """The model that `reference`, the value of the recipe's `key`, stands for."""
        found = self._find(key, reference)
        assert not isinstance(found, ModelCard), "stages are trained in order"
        return load(found)

    def card(self, key: str, reference: str) -> ModelCard:
        """The card of that model; its weights are checked to be there, and not read."""
        found = self._find(key, reference)
        return found if isinstance(found, ModelCard) else inspect(found)

    def _find(self, key: str, reference: str) -> Path | str | ModelCard:
        if reference == "previous":
            if self.earlier:
                return list(self.earlier.values())[-1]
            reference = "init"
        if reference == "init":
            if self.init is None:
                raise TcmError(f"{key} needs the model that the run starts from; give it with --init MODEL")
            return self.init
        return self.earlier.get(reference, reference)


@dataclass(frozen=True)
class StageModels:
    """The student at its start, and the models that help it."""

    student: Model
    frozen: Model | None
    teacher: Model | None


def check_run(recipe: Recipe, cards: Mapping[str, ModelCard], folders: Mapping[str, Path], init: str | None) -> None:
    """Refuse now what any stage of a run that is not done would refuse when it starts: a network, a model."""
    earlier: dict[str, Path | ModelCard] = {}
    for name, folder in folders.items():
        if (folder / "model").is_dir():
            earlier[name] = folder / "model"
            continue
        with torch.device("meta"):
            Model.fresh(cards[name])
        for role, reference in references(recipe.stages[name]).items():
            given = Sources(earlier, init).card(f"{name}.{role}", reference)
            check_role(recipe, name, role, given, cards[name])
        earlier[name] = cards[name]


def stage_models(recipe: Recipe, name: str, card: ModelCard, sources: Sources) -> StageModels:
    """The models of a stage, each checked to fit."""
    student = _fresh(card, recipe.seed, name)
    given: dict[Role, Model] = {}
    for role, reference in references(recipe.stages[name]).items():
        given[role] = sources.model(f"{name}.{role}", reference)
        check_role(recipe, name, role, given[role].card, card)
    if "init" in given:
        _copy_weights(given["init"], student)
    return StageModels(student, given.get("frozen"), given.get("teacher"))


def references(stage: Stage) -> dict[Role, str]:
    """The models that a stage needs, each in the recipe's words.

    >>> from tcm.recipes.resolve import resolve
    >>> references(resolve("digits").stages["truncated"])
    {'init': 'previous', 'frozen': 'previous', 'teacher': 'diffusion'}
    """
    found: dict[Role, str] = {}
    if stage.init != "scratch":
        found["init"] = stage.init
    if isinstance(stage, TruncatedStage):
        found["frozen"] = stage.frozen
    if isinstance(stage, PairsStage) and stage.teacher is not None:
        found["teacher"] = stage.teacher
    return found


def needed_stages(recipe: Recipe, name: str) -> frozenset[str]:
    """The earlier stages whose models a stage needs.

    >>> from tcm.recipes.resolve import resolve
    >>> sorted(needed_stages(resolve("demo"), "continued"))
    ['consistency', 'diffusion']
    """
    before = stages_before(recipe, name)
    found = references(recipe.stages[name]).values()
    return frozenset(before[-1:] if "previous" in found else []) | (frozenset(found) & frozenset(before))


def check_role(recipe: Recipe, name: str, role: Role, given: ModelCard, wanted: ModelCard) -> None:
    """Refuse a model that cannot play this role in a stage that makes the model `wanted`."""
    stage = recipe.stages[name]
    what = f"{name}.{role}={references(stage)[role]}"
    if role == "teacher":
        _check_teacher(what, given, wanted)
        return
    _check_fits(what, given, wanted)
    objective = objective_of(recipe, stage)
    if role == "frozen" and isinstance(objective, TruncatedConsistency):
        _check_frozen(what, objective, given)


def card_of(recipe: Recipe, name: str, image_shape: tuple[int, int, int], classes: int) -> ModelCard:
    """The card of the model that a stage makes."""
    stage = recipe.stages[name]
    t_min, t_max = time_range(recipe, stage)
    truncated = isinstance(stage, TruncatedStage)
    return ModelCard(
        kind=stage.objective,
        network=network_of(recipe, stage),
        image_shape=image_shape,
        classes=classes,
        sigma_data=recipe.sigma_data,
        t_min=t_min,
        t_max=t_max,
        t_prime=t_min if truncated else None,
        second_time=recipe.second_time,
        uncertainty=recipe.uncertainty if isinstance(stage, DiffusionStage) else 0,
        provenance=Provenance(recipe=recipe.name, stage=name, step=stage.steps),
    )


def _fresh(card: ModelCard, seed: int, name: str) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, name, "weights") % 2**63)
        return Model.fresh(card)


def _copy_weights(source: Model, student: Model) -> None:
    """Copy all but the uncertainty head, which a consistency model has no use for."""
    weights = student.denoiser.state_dict()
    weights |= {name: tensor for name, tensor in source.denoiser.state_dict().items() if name in weights}
    student.denoiser.load_state_dict(weights)


def _check_fits(what: str, given: ModelCard, wanted: ModelCard) -> None:
    """Refuse a model of another network, image shape, classes or sigma_data; dropout is free to differ."""
    found, needed = (
        {f"network.{key}": value for key, value in card.network.model_dump(exclude={"dropout"}).items()}
        | card.model_dump(include={"image_shape", "classes", "sigma_data"})
        for card in (given, wanted)
    )
    # The kind of a network comes before its other keys, which differ with it.
    for field in ("network.kind", *needed):
        if found.get(field) != needed[field]:
            raise TcmError(
                f"{what} has {field} {found.get(field)}, and this recipe needs {needed[field]}; make them the same"
            )


def _check_frozen(what: str, objective: TruncatedConsistency, frozen: ModelCard) -> None:
    if frozen.kind == "diffusion":
        raise TcmError(
            f"{what} is a diffusion model, and a consistency model is needed below t_prime; train a consistency stage "
            f"first"
        )
    t = torch.tensor([objective.t_prime], dtype=torch.float64)
    earliest = float(t - objective.pairs.curriculum.delta(t, 0))
    if not frozen.t_min <= earliest or not objective.t_prime <= frozen.t_max:
        raise TcmError(
            f"t_prime={objective.t_prime:g} asks {what} for t from {earliest:.4g}, and it is defined on "
            f"[{frozen.t_min:g}, {frozen.t_max:g}]; choose t_prime inside that range"
        )


def _check_teacher(what: str, teacher: ModelCard, wanted: ModelCard) -> None:
    if teacher.kind != "diffusion":
        raise TcmError(f"{what} is a {teacher.kind} model, and only a diffusion model can teach; name another")
    if (teacher.image_shape, teacher.classes) != (wanted.image_shape, wanted.classes):
        raise TcmError(
            f"{what} makes images {teacher.image_shape} of {teacher.classes} classes, and this recipe "
            f"{wanted.image_shape} of {wanted.classes}; name another"
        )
    if teacher.t_max < wanted.t_max:
        raise TcmError(f"{what} is defined up to t_max={teacher.t_max:g}, below {wanted.t_max:g}; lower t_max")
