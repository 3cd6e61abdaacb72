"""What the folder of a study looks like, and what is noted in it before anything is trained."""

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from tcm.evaluation.scores import read_scores
from tcm.foundation.errors import TcmError, TcmWarning, describe_validation
from tcm.foundation.files import read_record, write_text
from tcm.recipes.changes import changes
from tcm.recipes.folders import RECIPE_FILE, SCORES_FILE
from tcm.recipes.resolve import noted_recipe, resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.studies.common_stages import SharedStage, same_weights, stage_key
from tcm.studies.resolve import resolve_study, study_to_toml
from tcm.studies.schema import Study, Variant
from tcm.training.checkpoint import kept_checkpoints
from tcm.weights import ELSEWHERE_FILE

STUDY_FILE = "study.toml"
FAILED_FILE = "failed.json"
"""In a variant's folder: the stage that failed, and its error."""
MEASURED_FILE = "measured"
"""In a variant's folder: all its scores are there, and how many."""
STAGES = "stages"
"""In a study's folder: the folders of all stages, or a link to those that several studies share."""
BASE_FILE = "base.toml"
"""In a study's folder: a base recipe of one's own, so that the folder may be moved."""
DECISIVE = ("name", "overrides", "variants")
"""The keys of a study that decide its results, besides its base and what it measures; the others only say what to make
of them."""
MEASURING = "measuring"
"""What failed if no stage did."""


class Failure(BaseModel):
    """Why a variant has no result: the stage that failed, or "measuring", and its error."""

    model_config = ConfigDict(frozen=True)

    stage: str
    error: str
    diverged: bool = False
    """Whether the numbers ran away, which is a result, too."""


def run_folder(out: Path, variant: Variant) -> Path:
    """The folder of a variant's run."""
    return out / "runs" / f"seed-{variant.seed}" / variant.slug


def stage_folder(out: Path, key: str) -> Path:
    """The folder of a stage, which variants may share."""
    return out / STAGES / key


def share_stages(out: Path, shared: Path) -> None:
    """Keep the study's stages in a folder that other studies use too: a stage that they have in common is trained once.

    The study's own folder of stages becomes a link to it.
    """
    own = out / STAGES
    try:
        for folder in (out, shared):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock"):
            if own.is_symlink() and not own.exists():
                own.unlink()  # what it leads to was moved
            if not own.exists():
                own.symlink_to(os.path.relpath(shared.resolve(), out.resolve()), target_is_directory=True)
    except OSError as error:
        raise TcmError(
            f"--stages {shared} cannot be linked as {own} ({error.strerror}); leave it out, or choose another folder"
        ) from error
    if own.resolve() != shared.resolve():
        raise TcmError(
            f"--stages {shared}: the study's stages are in {own.resolve()}; leave it out, or use another --out"
        )


def noted_study(out: Path) -> Study:
    """The study whose folder this is."""
    path = out / STUDY_FILE
    if not path.is_file():
        raise TcmError(f"{out} is not a study's folder: it has no {STUDY_FILE}; make one with `tcm study run`")
    return resolve_study(path, trust=False)


def noted_failure(run: Path) -> Failure | None:
    """Why a variant failed, if it did."""
    path = run / FAILED_FILE
    try:
        return Failure.model_validate_json(read_record(path)) if path.exists() else None
    except ValidationError as error:
        raise describe_validation(error, str(path)) from error


def note_failure(run: Path, failure: Failure | None) -> None:
    """Write down why a variant failed; None forgets it, for the variant is tried again."""
    if failure is None:
        (run / FAILED_FILE).unlink(missing_ok=True)
    else:
        _write(run / FAILED_FILE, failure.model_dump_json(indent=2) + "\n")


def is_measured(run: Path) -> bool:
    """Whether all scores of a variant are there, and can be read."""
    path = run / MEASURED_FILE
    if not path.exists():
        return False
    count = read_record(path).strip()
    if not count.isdecimal():  # an earlier version noted no number
        return True
    try:
        return len(read_scores(run / SCORES_FILE)) >= int(count)
    except TcmError:
        return False


def prepare(study: Study, variants: Sequence[Variant], stages: Iterable[SharedStage], out: Path) -> None:
    """Note what the study is, and for each variant and stage its recipe and where the stages of that are.

    Refuses another study than the one that the folder holds; more seeds and other words are taken over.
    """
    shared = out / STAGES
    if shared.is_symlink() and not shared.exists():
        raise TcmError(
            f"{shared} leads to {os.readlink(shared)}, which is not there; say where it is now with --stages"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock"):
            _note_study(study, out)
            for variant in variants:
                _check_variant(variant, out)
                _note_run(run_folder(out, variant), variant.recipe, out)
            for stage in stages:
                _check_stage(stage, out)
                if stage.name in study.measure.curve:
                    _warn_of_missing_points(stage, out)
                _note_run(stage_folder(out, stage.key), stage.recipe, out)
    except OSError as error:
        raise TcmError(f"{out} cannot be used as a study's folder ({error.strerror}); choose another --out") from error


def _note_study(study: Study, out: Path) -> None:
    if (out / STUDY_FILE).exists():
        noted = noted_study(out)
        if other := _differing(study, noted, measured=any(out.glob(f"runs/*/*/{SCORES_FILE}"))):
            what = noted.name if "name" in other else f"with other {', '.join(other)}"
            raise TcmError(f"{out} holds another study ({what}); choose another --out")
        seeds = tuple(dict.fromkeys([*noted.seeds, *study.seeds]))
        study = study.model_copy(update={"seeds": seeds})
    if study.base.endswith(".toml"):
        _write(out / BASE_FILE, to_toml(resolve(study.base)))
        study = study.model_copy(update={"base": BASE_FILE})
    _write(out / STUDY_FILE, study_to_toml(study))


def _differing(study: Study, noted: Study, measured: bool) -> list[str]:
    """The keys in which two studies differ so that they cannot share a folder."""
    other = [key for key in DECISIVE if getattr(study, key) != getattr(noted, key)]
    other += ["base"] if resolve(study.base) != resolve(noted.base, trust=False) else []
    return other + (["measure"] if measured and study.measure != noted.measure else [])


def _check_variant(variant: Variant, out: Path) -> None:
    folder = run_folder(out, variant)
    if (folder / RECIPE_FILE).exists():
        found = changes(noted_recipe(folder), variant.recipe)
        if refused := [change.text for change in found if change.rule != "free"]:
            raise TcmError(f"{folder} was started with another recipe ({'; '.join(refused)}); choose another --out")


def _check_stage(stage: SharedStage, out: Path) -> None:
    """Defaults may have changed with the version; variants that share a stage may differ in what does not matter."""
    folder = stage_folder(out, stage.key)
    if (folder / RECIPE_FILE).exists() and not same_weights(noted_recipe(folder), stage.recipe, stage.name):
        raise TcmError(f"{folder} was trained with other defaults, by another version; choose another --out")


def _warn_of_missing_points(stage: SharedStage, out: Path) -> None:
    """A stage that another study trained may have kept fewer checkpoints than a curve needs."""
    folder, spec = stage_folder(out, stage.key), stage.recipe.stages[stage.name]
    kept, wanted = len(kept_checkpoints(folder / "state")), min(spec.keep, spec.steps // spec.checkpoint_every)
    if (folder / "model").is_dir() and not spec.until_flat and kept < wanted:
        warnings.warn(
            f"{folder} has {kept} of {wanted} checkpoints, since another study trained it: its curve has only these; "
            "for all of them, use another --stages folder",
            TcmWarning,
            stacklevel=3,
        )


def _note_run(run: Path, recipe: Recipe, out: Path) -> None:
    """Make a folder a run's whose stages are elsewhere."""
    folders = {name: stage_folder(out, stage_key(recipe, name)) for name in recipe.stages}
    relative = {name: Path(os.path.relpath(folder, run)).as_posix() for name, folder in folders.items()}
    _write(run / ELSEWHERE_FILE, json.dumps(relative, indent=2) + "\n")
    _write(run / RECIPE_FILE, to_toml(recipe))


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text("utf-8") != text:
        write_text(path, text)
