"""Where a stage's models come from: scratch, an earlier stage, the model given with --init, a model folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tcm.errors import TcmError
from tcm.method.objectives import TruncatedConsistency
from tcm.method.streams import derive_seed
from tcm.recipes.fields import DiffusionStage, PairsStage, TruncatedStage, time_range
from tcm.recipes.schema import Recipe, network_of, objective_of
from tcm.weights import Model, ModelCard, Provenance, load


@dataclass(frozen=True)
class Sources:
    """The models that a recipe's words refer to: `folders` of the stages done so far, and the one given with --init."""

    folders: dict[str, Path]
    init: str | None

    def model(self, key: str, reference: str) -> Model:
        """The model that `reference`, the value of the recipe's `key`, stands for."""
        if reference == "previous":
            if self.folders:
                return Model.load(list(self.folders.values())[-1])
            reference = "init"
        if reference == "init":
            if self.init is None:
                raise TcmError(f"{key} needs the model that the run starts from; give it with --init MODEL")
            return load(self.init)
        if reference in self.folders:
            return Model.load(self.folders[reference])
        return load(reference)


@dataclass(frozen=True)
class StageModels:
    """The student at its start, and the models that help it."""

    student: Model
    frozen: Model | None
    teacher: Model | None


def stage_models(recipe: Recipe, name: str, card: ModelCard, sources: Sources) -> StageModels:
    """The models of a stage, each checked to fit."""
    stage = recipe.stages[name]
    student = _fresh(card, recipe.seed, name)
    if stage.init != "scratch":
        source = sources.model(f"{name}.init", stage.init)
        _check_fits(f"{name}.init={stage.init}", source.card, card)
        _copy_weights(source, student)
    frozen = teacher = None
    objective = objective_of(recipe, stage)
    if isinstance(stage, TruncatedStage) and isinstance(objective, TruncatedConsistency):
        frozen = sources.model(f"{name}.frozen", stage.frozen)
        what = f"{name}.frozen={stage.frozen}"
        _check_fits(what, frozen.card, card)
        _check_frozen(what, objective, frozen.card)
    if isinstance(stage, PairsStage) and stage.teacher is not None:
        teacher = sources.model(f"{name}.teacher", stage.teacher)
        _check_teacher(f"{name}.teacher={stage.teacher}", teacher.card, card)
    return StageModels(student, frozen, teacher)


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
