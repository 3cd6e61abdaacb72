"""An existing run and the recipe that it resumes with: what may differ, and what a longer stage means for others."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tcm.foundation.errors import TcmError
from tcm.foundation.files import read_record, sync_folder, write_text
from tcm.recipes.changes import Change, changes
from tcm.recipes.decided import settled
from tcm.recipes.folders import RECIPE_FILE, stage_folders
from tcm.recipes.resolve import noted_recipe, to_toml
from tcm.recipes.schema import Recipe
from tcm.training.stage_models import needed_stages
from tcm.weights import is_run, last_model

INIT_FILE = "init.txt"


@dataclass(frozen=True)
class Resumption:
    """What changes in a run that resumes with another recipe than it has noted; nothing in most of them."""

    said: tuple[str, ...] = ()
    """The changes, in words."""
    moved: Change | None = None
    """The data has another path, and must be checked to be the same."""
    extended: Mapping[str, int] = field(default_factory=dict)
    """The finished stages that are trained further, and the steps they have had."""


def resumption(recipe: Recipe, run: Path) -> Resumption:
    """What a recipe changes in a run; refuses what would make it another run. A stage not begun yet may change."""
    if not (run / RECIPE_FILE).exists():
        return Resumption()
    noted, folders = settled(noted_recipe(run), run), stage_folders(recipe, run)
    found = changes(noted, settled(recipe, run))
    begun = {name for name, folder in folders.items() if _begun(folder)}
    found = [change for change in found if change.stage in begun or change.stage not in folders]
    if refused := [change.text for change in found if change.rule is None]:
        remedy = "use the run's own recipe or another --run"
        raise TcmError(f"{run} was started with another recipe ({'; '.join(refused)}); {remedy}")
    longer = [change.stage for change in found if change.rule == "longer"]
    if later := [folders[name] for name in _dependents(recipe, longer) if name in begun]:
        raise TcmError(
            f"{', '.join(map(str, later))} would no longer be trained from the model of {', '.join(longer)}; to train "
            f"again what depends on it, move {', '.join(folder.name for folder in later)} to another place first, or "
            "use another --run"
        )
    extended = {name: noted.stages[name].steps for name in longer if (folders[name] / "model").is_dir()}
    for name, steps in extended.items():
        _check_extension(name, folders[name], steps)
    said = [_in_words(change, extended) for change in found]
    moved = next((change for change in found if change.rule == "same content"), None)
    return Resumption(tuple(said), moved, extended)


def adopt(change: Resumption, recipe: Recipe, run: Path) -> None:
    """Carry out what changes: reopen what is extended, note the recipe.

    It may be interrupted anywhere: the same command then does the rest.
    """
    folders = stage_folders(recipe, run)
    for name, steps in change.extended.items():
        aside = folders[name] / f"model-step-{steps}"
        shutil.rmtree(aside, ignore_errors=True)
        (folders[name] / "model").rename(aside)
        sync_folder(folders[name])
    if change.said:
        note(run, recipe, None)


def noted_init(given: str | None, run: Path) -> str | None:
    """The model that the run starts from: noted when it is given first, so that a resumed run needs no --init."""
    if given is not None and Path(given).is_dir():
        given = str((last_model(Path(given)) if is_run(Path(given)) else Path(given)).absolute())
    path = run / INIT_FILE
    noted = read_record(path) if path.exists() else given
    if given not in (None, noted):
        raise TcmError(f"{run} was started with --init {noted}, not {given}; leave out --init or use another --run")
    return noted


def note(run: Path, recipe: Recipe, init: str | None) -> None:
    """Write down what the run is, once all has been found to fit."""
    for name, text in ((RECIPE_FILE, to_toml(recipe)), (INIT_FILE, init)):
        if text is not None and (not (run / name).exists() or read_record(run / name) != text):
            write_text(run / name, text)


def _begun(stage: Path) -> bool:
    return (stage / "state").exists() or (stage / "model").exists()


def _dependents(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """The stages that were trained from one of these, or from one that was."""
    found: list[str] = []
    for name in recipe.stages:
        if needed_stages(recipe, name) & {*names, *found}:
            found.append(name)
    return found


def _check_extension(name: str, folder: Path, steps: int) -> None:
    last = folder / "state" / f"step-{steps}"
    if not last.is_dir():
        raise TcmError(
            f"{name} cannot be extended: its last checkpoint, {last}, does not exist any more; restore it, or train a "
            f"new run from its model with --init {folder / 'model'}"
        )


def _in_words(change: Change, extended: Mapping[str, int]) -> str:
    extra = {"same content": " (the same content)", "longer": " (extended)" if change.stage in extended else ""}
    return change.text + extra.get(change.rule or "", "")
