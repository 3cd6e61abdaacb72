"""The model format, safe import of published checkpoints, exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tcm.foundation.errors import TcmError
from tcm.foundation.files import read_regular
from tcm.foundation.plugins import Trust
from tcm.text.pipeline_folders import INDEX_FILE, find_pipeline
from tcm.weights.card import CONFIG_FILE, FILES, ModelCard, Provenance
from tcm.weights.model import Model

if TYPE_CHECKING:
    from tcm.weights.pipelines import Pipeline

__all__ = [
    "ELSEWHERE_FILE",
    "RECIPE_FILE",
    "Model",
    "ModelCard",
    "Provenance",
    "bundled_models",
    "find",
    "inspect",
    "is_pipeline",
    "is_run",
    "last_model",
    "load",
    "stages_elsewhere",
]

RECIPE_FILE = "recipe.toml"
"""What a run's folder holds besides those of its stages, such as 2-truncated with the stage's model."""

ELSEWHERE_FILE = "elsewhere.json"
"""In a run's folder, if its stages have their folders elsewhere: the folder of each stage, relative to the run's."""

BUNDLED = Path(__file__).parent / "bundled"
"""The models that come with the package."""


def bundled_models() -> list[str]:
    """The names of the models that come with the package.

    >>> "digits" in bundled_models()
    True
    """
    return sorted(folder.name for folder in BUNDLED.iterdir() if (folder / CONFIG_FILE).is_file())


def load(path: str | Path, trust: Trust = False) -> Model:
    """The model in a folder, of a run's last finished stage (`runs/digits`), one that comes with the package
    (`digits`, `fashion-mnist`, `cifar10-16`), or of a Hugging Face hub id such as `someone/cifar10-tcm`. Nothing is
    unpickled. A module of yours that its card names is only imported if you `trust` it (`"module"`, or several) or have
    imported it yourself.

    Also the UNet of a Stable Diffusion pipeline, by its folder or hub id (the extra `t2i`).
    """
    found = find(path)
    return _pipeline(found, path).model() if is_pipeline(found) else Model.load(found, trust)


def inspect(path: str | Path) -> ModelCard:
    """The card of that model; its weights are downloaded and checked to be intact, but not read.

    >>> inspect("digits").kind
    'truncated'
    """
    found = find(path)
    return _pipeline(found, path).card() if is_pipeline(found) else Model.inspect(found)


def is_pipeline(folder: Path) -> bool:
    """Whether this is the folder of a diffusers pipeline."""
    return (folder / INDEX_FILE).is_file()


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return (path / RECIPE_FILE).is_file() and not (path / CONFIG_FILE).exists()


def stages_elsewhere(run: Path) -> dict[str, Path]:
    """The folders of those of a run's stages that are elsewhere, in the run's order."""
    path = run / ELSEWHERE_FILE
    if not path.exists():
        return {}
    noted = read_regular(path)
    try:
        return {str(name): (run / folder).resolve() for name, folder in json.loads(noted).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TcmError(
            f"{path} does not say where the run's stages are ({error}); run the study again to rewrite it"
        ) from error


def last_model(run: Path) -> Path:
    """The folder of the model of a run's last finished stage."""
    shared = [folder / "model" for folder in stages_elsewhere(run).values()]
    if finished := [model for model in shared if (model / CONFIG_FILE).is_file()]:
        return finished[-1]
    stages = [(re.fullmatch(r"(\d+)-[a-z][a-z0-9_-]*", folder.name), folder / "model") for folder in run.iterdir()]
    found = [(int(name[1]), model) for name, model in stages if name and (model / CONFIG_FILE).is_file()]
    if not found:
        raise TcmError(f"{run} is a run without a finished stage; train it first, with `tcm train {run}`")
    return max(found)[1]


def find(path: str | Path) -> Path:
    """The folder on this machine of the model that `load` takes; one on the hub is downloaded."""
    if not isinstance(path, str | Path):
        raise TcmError(f"{path!r} is not a path; {_advice()}")
    own = Path(path)
    named = str(path) in bundled_models()
    if own.is_dir() and (not named or is_run(own) or (own / CONFIG_FILE).is_file()):
        return last_model(own) if is_run(own) else own
    if named:
        return BUNDLED / path
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise TcmError(f"{path} is not a folder; {_advice()}")
    return find_pipeline(str(path)) or _download(str(path))


def _advice() -> str:
    return f"give a model folder, {', '.join(bundled_models())}, or a hub id such as someone/model"


def _pipeline(folder: Path, given: str | Path) -> Pipeline:
    from tcm.weights.pipelines import read_pipeline

    # A hub id stays what it is: the folder of its copy is this machine's business.
    return read_pipeline(folder, str(folder.absolute()) if Path(given).is_dir() else str(given))


def _download(name: str) -> Path:
    """The folder of a model on the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TcmError(
            f"{name} is neither a folder nor a model on the hub ({reason}); check the name and the connection"
        ) from error
