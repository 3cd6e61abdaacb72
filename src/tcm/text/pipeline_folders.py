"""Where a diffusers pipeline is: a folder with a model_index.json, or the hub's copy of one."""

from functools import lru_cache
from pathlib import Path

from tcm.foundation.errors import TcmError

INDEX_FILE = "model_index.json"
PARTS = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
"""The folders of a pipeline that we use."""
WANTED = [INDEX_FILE, *(f"{part}/{file}" for part in PARTS for file in ("*.json", "*.txt"))]
WEIGHTS = [f"{part}/{name}.safetensors" for part in PARTS for name in ("diffusion_pytorch_model", "model")]
"""Other files of the hub's pipelines (pickles, other precisions, the safety checker) are not downloaded."""


def find_pipeline(reference: str) -> Path | None:
    """The folder of a pipeline, by its path or hub id; None if it is something else."""
    folder = Path(reference)
    if folder.is_dir():
        return folder if (folder / INDEX_FILE).is_file() else None
    if reference.count("/") != 1 or reference.startswith((".", "/", "~")):
        return None
    return _download(reference)


@lru_cache(maxsize=8)
def _download(name: str) -> Path | None:
    """The hub's pipeline of this name, on this machine; None if the hub has no pipeline of this name."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        hf_hub_download(name, INDEX_FILE)
    except (RepositoryNotFoundError, LocalEntryNotFoundError, EntryNotFoundError, HFValidationError):
        return None
    except (HfHubHTTPError, OSError):
        return None  # whoever asked tries it as a model of ours, and says what is wrong
    try:
        return Path(snapshot_download(name, allow_patterns=[*WANTED, *WEIGHTS]))
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TcmError(f"the pipeline {name} cannot be downloaded ({reason}); try again") from error
