"""The model format, safe import of published checkpoints, exports."""

from pathlib import Path

from tcm.foundation.errors import TcmError
from tcm.weights.model import CONFIG_FILE, WEIGHTS_FILE, Model, ModelCard, Provenance

__all__ = ["Model", "ModelCard", "Provenance", "inspect", "load"]

BUNDLED = Path(__file__).parent / "bundled"
"""The models that come with the package."""


def load(path: str | Path) -> Model:
    """The model in a folder, one that comes with the package (`digits`), or of a Hugging Face hub id such as
    `someone/cifar10-tcm`. Nothing is unpickled.
    """
    return Model.load(_find(path))


def inspect(path: str | Path) -> ModelCard:
    """The card of that model; its weights are downloaded and checked to be intact, but not read.

    >>> inspect("digits").kind
    'truncated'
    """
    return Model.inspect(_find(path))


def _find(path: str | Path) -> Path:
    """The model's folder on this machine."""
    if Path(path).is_dir():
        return Path(path)
    if (BUNDLED / path).is_dir():
        return BUNDLED / path
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise TcmError(f"{path} is not a folder; give a model folder, digits, or a hub id such as someone/model")
    return _download(str(path))


def _download(name: str) -> Path:
    """The folder of a model on the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TcmError(f"{name} is neither a folder nor a model on the hub ({reason})") from error
