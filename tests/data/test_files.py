"""Files are whole or absent, also when the process is killed in the middle of writing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tcm.data.limits import check_expansion
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write, check_writable, new_folder


def test_a_file_appears_whole(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "new" / "a.bin") as file:
        file.write(b"content")
        assert not (tmp_path / "new" / "a.bin").exists()
    assert (tmp_path / "new" / "a.bin").read_bytes() == b"content"
    assert os.listdir(tmp_path / "new") == ["a.bin"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where a file in it is open."""
    old, rename = tmp_path / "model", Path.rename
    old.mkdir()
    (old / "a.bin").write_bytes(b"old")

    def refuse(path: Path, target: Path) -> Path:
        if target == old and path.parent == tmp_path:
            raise PermissionError("in use")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError), new_folder(old) as folder:
        (folder / "a.bin").write_bytes(b"new")
    assert (old / "a.bin").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model"]


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    code = f"""
import time
from tcm.foundation.files import atomic_write
with atomic_write({str(path)!r}) as file:
    file.write(bytes(10_000_000))
    file.flush()
    print("half", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"


def test_a_finished_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    with atomic_write(tmp_path / "ours"):
        pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc, and its limit of file sizes")
def test_what_cannot_be_written_is_an_error_that_the_user_can_fix(tmp_path: Path) -> None:
    """One that names the path, its own cause and a remedy, leaves nothing behind, and keeps what was there."""
    (tmp_path / "file").write_bytes(b"old")
    for place in (Path("/proc/new"), tmp_path / "file" / "below" / "new"):
        for write in (lambda path: atomic_write(path).__enter__(), lambda path: new_folder(path).__enter__()):
            with pytest.raises(TcmError, match=rf"{place} cannot be written \(.+\); name a place that can be written"):
                write(place)
        with pytest.raises(TcmError, match=rf"{place} cannot be written"):
            check_writable(place)
    check_writable(tmp_path / "not" / "there")
    tensors = {"a": torch.zeros(10_000)}
    with (
        limited(10_000),
        pytest.raises(TcmError, match=r"file cannot be written \(File too large\); free some space there"),
        atomic_write(tmp_path / "file") as file,
    ):
        file.write(bytes(20_000))
    with (
        limited(10_000),
        pytest.raises(TcmError, match=r"folder cannot be written \(.*File too large.*\); free some space there"),
        new_folder(tmp_path / "folder") as folder,
    ):
        save_file(tensors, folder / "a.safetensors")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_other_errors_of_files_stay_what_they_are(tmp_path: Path) -> None:
    """What is read while a file is written is not what cannot be written."""
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a.bin"):
        (tmp_path / "b.bin").read_bytes()
    with pytest.raises(ConnectionError), atomic_write(tmp_path / "a.bin"):
        raise ConnectionError("ended")
    assert os.listdir(tmp_path) == []


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file may grow beyond this size."""
    import resource

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_expansion_limit() -> None:
    check_expansion("a", 64 * 2**20, 1)
    check_expansion("a", 200 * 2**30, 2**30)
    with pytest.raises(TcmError, match="bomb"):
        check_expansion("a", 64 * 2**20 + 1, 1)
