"""Downloads: what and how large is said before they start, on stderr; a cut connection is an error."""

import hashlib
import os
import shutil
import sys
import urllib.request
from pathlib import Path

from tcm.foundation.errors import TcmError
from tcm.foundation.files import byte_size

SILENT_SECONDS = 20.0
"""A server that sends nothing for so long is given up."""


def data_folder() -> Path:
    """Where fetched data sets and weights are kept: $TCM_DATA, or tcm in the user's cache folder."""
    chosen = os.environ.get("TCM_DATA")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcm"


def download(url: str, target: Path, what: str) -> None:
    """Fetch a file; OSError or HTTPException where that fails or the connection ends early."""
    with urllib.request.urlopen(url, timeout=SILENT_SECONDS) as answer, target.open("wb") as file:
        length = answer.headers["Content-Length"]
        announce(what, url, None if length is None else int(length))
        shutil.copyfileobj(answer, file)
        if length is not None and file.tell() != int(length):
            raise OSError(f"the connection ended after {file.tell():,} of {int(length):,} bytes")


def verify(path: Path, expected: str) -> None:
    """Refuse a file that is not the published one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise TcmError(f"{path} has SHA-256 {found[:12]}…, not {expected[:12]}…; delete it if it exists, and try again")


def announce(what: str, source: str, size: int | None) -> None:
    """Say on stderr what is about to be fetched."""
    amount = "size unknown" if size is None else byte_size(size)
    print(f"fetching {what} from {source} ({amount})", file=sys.stderr, flush=True)
