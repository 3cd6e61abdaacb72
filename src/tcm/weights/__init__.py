"""The model format, safe import of published checkpoints, exports."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tcm.errors import TcmError
from tcm.weights.model import CONFIG_FILE, WEIGHTS_FILE, Model, ModelCard, Provenance

__all__ = ["Model", "ModelCard", "Provenance", "load"]

BUNDLED = Path(__file__).parent / "bundled"
"""The models that come with the package."""


def load(path: str | Path) -> Model:
    """The model in a folder, one that comes with the package (`digits`), or of a Hugging Face hub id such as
    `someone/cifar10-tcm`. Nothing is unpickled.
    """
    if Path(path).is_dir():
        return Model.load(path)
    if (BUNDLED / path).is_dir():
        return Model.load(BUNDLED / path)
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise TcmError(f"{path} is not a folder; give a model folder, digits, or a hub id such as someone/model")
    try:
        return Model.load(snapshot_download(str(path), allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TcmError(f"{path} is neither a folder nor a model that the hub offers ({reason})") from error
