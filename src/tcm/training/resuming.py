"""An existing run and the recipe that it resumes with: what may differ, and what a longer stage means for others."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tcm.foundation.errors import TcmError
from tcm.foundation.files import sync_folder, write_text
from tcm.recipes.changes import Change, changes
from tcm.recipes.decided import settled
from tcm.recipes.folders import RECIPE_FILE, moved_aside, stage_folders
from tcm.recipes.resolve import noted_recipe, to_toml
from tcm.recipes.schema import Recipe
from tcm.training.stage_models import needed_stages
from tcm.weights import is_run, last_model

INIT_FILE, KEPT_FILE = "init.txt", "kept.txt"
"""The latter is in a stage's folder: it stays as it is although a stage that it was trained from has changed since."""

Later = Literal["redo", "keep"]
"""What happens to finished stages that were trained from a stage that is now extended."""


@dataclass(frozen=True)
class Resumption:
    """What changes in a run that resumes with another recipe than it has noted; nothing in most of them."""

    said: tuple[str, ...] = ()
    """The changes, in words."""
    moved: Change | None = None
    """The data has another path, and must be checked to be the same."""
    extended: Mapping[str, int] = field(default_factory=dict)
    """The finished stages that are trained further, and the steps they have had."""
    redone: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def resumption(recipe: Recipe, run: Path, later: Later | None) -> Resumption:
    """What a recipe changes in a run; refuses what would make it another run. A stage not begun yet may change."""
    if not (run / RECIPE_FILE).exists():
        return Resumption()
    noted, folders = settled(noted_recipe(run), run), stage_folders(recipe, run)
    found = changes(noted, settled(recipe, run))
    begun = {name for name, folder in folders.items() if _begun(folder)}
    longer = [change.stage for change in found if change.rule == "longer" and change.stage in begun]
    affected = [name for name in _dependents(recipe, longer) if name in begun]
    redone = affected if later == "redo" else []
    free_stages = (folders.keys() - begun) | set(redone)
    found = [change for change in found if change.stage not in free_stages]
    if refused := [change.text for change in found if change.rule is None]:
        remedy = "use the run's own recipe or another --run"
        raise TcmError(f"{run} was started with another recipe ({'; '.join(refused)}); {remedy}")
    longer = [name for name in longer if name not in redone]
    extended = {name: noted.stages[name].steps for name in longer if (folders[name] / "model").is_dir()}
    for name, steps in extended.items():
        _check_extension(name, folders[name], steps)
    _check_later(run, longer, affected, folders, later)
    said = [_in_words(change, extended) for change in found]
    said += [
        f"{folders[name].name} is trained again (the old one: {moved_aside(folders[name]).name})" for name in redone
    ]
    kept = [name for name in affected if later == "keep"]
    said += [f"{folders[name].name} stays as it is" for name in kept]
    moved = next((change for change in found if change.rule == "same content"), None)
    return Resumption(tuple(said), moved, extended, tuple(redone), tuple(kept))


def adopt(change: Resumption, recipe: Recipe, run: Path) -> None:
    """Carry out what changes: move aside what is trained again, reopen what is extended, note the recipe.

    It may be interrupted anywhere: the same command then does the rest.
    """
    folders = stage_folders(recipe, run)
    for name in change.kept:
        write_text(folders[name] / KEPT_FILE, "a stage that this one was trained from has been extended since\n")
    for name in change.redone:
        as_it_was = settled(noted_recipe(run), run)
        write_text(folders[name] / RECIPE_FILE, to_toml(as_it_was))
        folders[name].rename(moved_aside(folders[name]))
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
    noted = path.read_text("utf-8") if path.exists() else given
    if given not in (None, noted):
        raise TcmError(f"{run} was started with --init {noted}, not {given}; leave out --init or use another --run")
    return noted


def note(run: Path, recipe: Recipe, init: str | None) -> None:
    """Write down what the run is, once all has been found to fit."""
    for name, text in ((RECIPE_FILE, to_toml(recipe)), (INIT_FILE, init)):
        if text is not None and (not (run / name).exists() or (run / name).read_text("utf-8") != text):
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
    if (folder / KEPT_FILE).exists():
        raise TcmError(
            f"{name} cannot be extended: it was trained from a model that has changed since; extend an earlier stage "
            "with --redo-later, or use another --run"
        )


def _check_later(
    run: Path, longer: list[str], affected: list[str], folders: Mapping[str, Path], later: Later | None
) -> None:
    """Stages that were trained from one that is now longer: the user says what happens to them."""
    if not affected or later == "redo":
        return
    names = ", ".join(folders[name].name for name in affected)
    if later is None:
        raise TcmError(
            f"{names} of {run} would no longer be trained from the model of {', '.join(longer)}; pass --redo-later to "
            "train the later stages again (the old ones are moved aside), or --keep-later to leave them as they are"
        )
    for name in affected:
        if name in longer or not (folders[name] / "model").is_dir():
            state = "is being extended too" if name in longer else "has not finished"
            raise TcmError(f"--keep-later: {folders[name].name} {state}, so it cannot stay as it is; pass --redo-later")


def _in_words(change: Change, extended: Mapping[str, int]) -> str:
    extra = {"same content": " (the same content)", "longer": " (extended)" if change.stage in extended else ""}
    return change.text + extra.get(change.rule or "", "")
