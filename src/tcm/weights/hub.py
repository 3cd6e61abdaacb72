"""Models for the Hugging Face hub: a folder with weights, card and samples, and its upload."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from tcm.data.grid import save_grid
from tcm.data.pixels import to_uint8
from tcm.foundation.errors import TcmError
from tcm.foundation.files import new_folder
from tcm.weights.hub_card import SAMPLES_FILE, CardScore, card_text
from tcm.weights.model import Model

README_FILE = "README.md"
PICTURES = 16
SMALL_SIDE = 64
"""Images below this size are enlarged in the picture, pixel by pixel."""


@dataclass(frozen=True)
class HubFolder:
    """What is uploaded to `repository`, such as someone/name; `recipe` is the text of the run's recipe.toml."""

    model: Model
    repository: str
    scores: Sequence[CardScore] = ()
    recipe: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repository)
        except HFValidationError as error:
            raise TcmError(
                f"{self.repository!r} is not a name on the hub ({error}); use one like someone/name"
            ) from error
        if self.repository.count("/") != 1:
            raise TcmError(f"{self.repository!r} names no owner; use a name like someone/{self.repository}")

    def write(self, out: Path) -> None:
        """Write config.json, model.safetensors, README.md and samples.png into a new folder."""
        if out.exists():
            raise TcmError(f"--out={out} exists; name a new folder")
        model = self._licensed()
        with new_folder(out) as folder:
            model.write_files(folder)
            pictures = _draw(model, folder / SAMPLES_FILE)
            text = card_text(model, self.repository, scores=self.scores, recipe=self.recipe, pictures=pictures)
            (folder / README_FILE).write_text(text, "utf-8")

    def _licensed(self) -> Model:
        """The model, whose card says the licence that its owner gives it."""
        if self.licence is None:
            return self.model
        came = self.model.card.provenance
        if came.licence is not None and came.licence != self.licence:
            raise TcmError(
                f"--licence {self.licence}: the model's card already says {came.licence!r}; leave --licence out"
            )
        provenance = came.model_copy(update={"licence": self.licence})
        return Model(self.model.denoiser, self.model.card.model_copy(update={"provenance": provenance}))


def push(folder: HubFolder, *, private: bool = False, token: str | None = None) -> str:
    """Upload a model and its card; returns the address. The repository is made if there is none."""
    # The errors of the library that the hub's connects with, which has changed: none is named here.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    if (token or get_token()) is None:
        raise TcmError("no token for the hub; run `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token, library_name="truncated-consistency")
    with TemporaryDirectory() as place:
        path = Path(place) / "model"
        folder.write(path)
        try:
            api.create_repo(folder.repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=folder.repository, folder_path=path, commit_message="Upload a truncated-consistency model"
            )
        except (HTTPError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise TcmError(
                f"{folder.repository} could not be uploaded ({reason}); check the name, the token and the network, or "
                "write the folder with --dry-run"
            ) from error
    return f"{api.endpoint}/{folder.repository}"


def _draw(model: Model, path: Path) -> int:
    """A picture of samples, if the model makes pictures; returns how many it holds."""
    channels, _, width = model.card.image_shape
    if channels not in (1, 3):
        return 0
    kind = model.card.condition
    images = model.sample(PICTURES, condition=None if kind is None else kind.spread(PICTURES))
    save_grid(path, to_uint8(images), columns=8, scale=max(1, SMALL_SIDE // width))
    return PICTURES
