"""The hash of a data set's content is computed once, and found again as long as the files stay as they are."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import writers

from tcm.data import ArrayDataset, ClassLabels, Dataset, open_dataset
from tcm.data.hashing import KEPT, BackgroundHash, hash_of

IMAGES = writers.sample_pixels(23, height=8, width=6)
LABELS = writers.sample_labels()
TRUTH = ArrayDataset(IMAGES, ClassLabels.of(LABELS, "the test")).content_hash()
UNLABELLED = ArrayDataset(IMAGES).content_hash()
LONG_AGO = 1_600_000_000_000_000_000


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))


def settle(*paths: Path, at: int = LONG_AGO) -> None:
    """Let the files be as old as data usually are."""
    for path in paths:
        for file in [path, *path.rglob("*")]:
            os.utime(file, ns=(at, at))


def opened(path: Path, **options: object) -> Dataset:
    return open_dataset(path, memory_limit=0, **options)


def write(kind: str, at: Path) -> Path:
    match kind:
        case "folder":
            return writers.write_files(at / "d", writers.with_csv(IMAGES, LABELS))
        case "zip":
            return writers.write_zip(at / "d.zip", writers.with_csv(IMAGES, LABELS))
        case "shards":
            return writers.write_shards(at / "d", IMAGES, LABELS)
        case "npy":
            np.save(at / "d.npy", IMAGES)
            return at / "d.npy"
        case _:
            return writers.write_hugging_face(at / "d", IMAGES, LABELS, parquet=kind == "parquet")


def damage(path: Path) -> None:
    """Overwrite all files without their looking different from outside."""
    for file in [path, *path.rglob("*")]:
        if file.is_file() and file.name not in (KEPT, "labels.csv"):
            status = file.stat()
            file.write_bytes(bytes(status.st_size))
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("kind", ["folder", "zip", "shards", "npy", "saved", "parquet"])
def test_every_container_has_the_same_hash_and_is_read_for_it_once(kind: str, tmp_path: Path) -> None:
    path = write(kind, tmp_path)
    settle(path)
    dataset = opened(path)
    for stored in dataset.stored().files:  # Hugging Face copies parquet into files of its own
        settle(stored)
    expected = UNLABELLED if kind == "npy" else TRUTH
    assert hash_of(dataset) == expected
    for stored in list(dataset.stored().files):
        damage(stored)
    assert hash_of(dataset) == expected  # nothing was read


def test_it_is_kept_beside_the_data_and_moves_with_them(tmp_path: Path) -> None:
    for kind in ("folder", "zip"):
        (tmp_path / kind).mkdir()
        path = write(kind, tmp_path / kind)
        settle(path)
        hash_of(opened(path))
        moved = tmp_path / f"{kind} elsewhere"
        (tmp_path / kind).rename(moved)
        dataset = opened(moved / path.name)
        damage(moved / path.name)
        assert hash_of(dataset) == TRUTH
        assert len(list(moved.rglob(KEPT))) == 1
    assert not (tmp_path / "cache").exists()


def test_any_change_is_seen(tmp_path: Path) -> None:
    path = write("folder", tmp_path)
    settle(path)
    assert hash_of(opened(path)) == TRUTH
    (path / "00003.png").write_bytes(writers.png(255 - IMAGES[3]))
    settle(path / "00003.png", at=LONG_AGO + 1)
    other = IMAGES.copy()
    other[3] = 255 - IMAGES[3]
    changed = ArrayDataset(other, ClassLabels.of(LABELS, "the test")).content_hash()
    assert hash_of(opened(path)) == changed
    table = (path / "labels.csv").read_text().replace("apple", "banana")
    (path / "labels.csv").write_text(table)
    settle(path / "labels.csv")
    relabelled = hash_of(opened(path))
    assert relabelled == opened(path).content_hash()
    grey = opened(path, channels=1)
    assert hash_of(grey) == grey.content_hash()
    assert len({TRUTH, changed, relabelled, hash_of(grey)}) == 4
    (path / "00009.png").write_bytes(b"broken")
    settle(path / "00009.png")
    with pytest.warns(UserWarning, match="left out 1"):
        fewer = opened(path, skip_broken=True)
    assert hash_of(fewer) == fewer.content_hash()


def test_what_has_just_been_written_is_not_kept(tmp_path: Path) -> None:
    """It could change once more within the file system's unit of time."""
    path = write("npy", tmp_path)
    assert hash_of(opened(path)) == UNLABELLED
    assert not list(tmp_path.rglob(KEPT))


def test_what_changes_meanwhile_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("npy", tmp_path)
    settle(path)
    dataset = opened(path)
    original = dataset.content_hash

    def slow() -> str:
        found = original()
        settle(path, at=LONG_AGO + 1)
        return found

    monkeypatch.setattr(dataset, "content_hash", slow)
    assert hash_of(dataset) == UNLABELLED
    assert not list(tmp_path.rglob(KEPT))


def test_a_folder_that_cannot_be_written_uses_the_cache(tmp_path: Path) -> None:
    path = write("npy", tmp_path)
    settle(path)
    (tmp_path / KEPT).mkdir()  # also root cannot put a file there
    hash_of(opened(path))
    assert len(list((tmp_path / "cache" / "hashes").iterdir())) == 1
    dataset = opened(path)
    damage(path)
    assert hash_of(dataset) == UNLABELLED
    (tmp_path / "cache").rename(tmp_path / "lost")
    (tmp_path / "cache").write_text("no folder")
    np.save(path, IMAGES)
    settle(path)
    assert hash_of(opened(path)) == UNLABELLED


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b'{"a": 3}', b"\xff"])
def test_a_damaged_file_of_hashes_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = write("npy", tmp_path)
    settle(path)
    (tmp_path / KEPT).write_bytes(content)
    assert hash_of(opened(path)) == UNLABELLED
    assert list(json.loads((tmp_path / KEPT).read_text()).values()) == [UNLABELLED]


def test_hashes_of_several_data_in_a_folder_stay_beside_each_other(tmp_path: Path) -> None:
    writers.write_zip(tmp_path / "a.zip", writers.with_csv(IMAGES, LABELS))
    writers.write_zip(tmp_path / "b.zip", writers.numbered(IMAGES))
    settle(tmp_path / "a.zip", tmp_path / "b.zip")
    for name in ("a.zip", "b.zip"):
        hash_of(opened(tmp_path / name))
    assert set(json.loads((tmp_path / KEPT).read_text()).values()) == {TRUTH, UNLABELLED}


def test_parts_of_the_same_tables_differ(tmp_path: Path) -> None:
    folder = writers.write_hugging_face(tmp_path / "d", IMAGES, np.zeros(23, np.int64), parquet=True)
    settle(folder)
    halves = [opened(folder, split=split) for split in ("train[:11]", "train[11:22]")]
    for stored in halves[0].stored().files:
        settle(stored)
    assert [hash_of(half) for half in halves] == [half.content_hash() for half in halves]
    assert hash_of(halves[0]) != hash_of(halves[1])


@pytest.mark.parametrize("kind", ["zip", "in memory"])
def test_in_the_background(kind: str, tmp_path: Path) -> None:
    path = write("zip", tmp_path)
    settle(path)
    with BackgroundHash(opened(path) if kind == "zip" else open_dataset(path)) as hashing:
        assert hashing.wait(120)
        assert (hashing.value, hashing.problem) == (TRUTH, "")
    assert (tmp_path / KEPT).exists() == (kind == "zip")


def test_in_the_background_a_broken_image_is_named(tmp_path: Path) -> None:
    files = {**writers.numbered(IMAGES), "00005.png": b"broken"}
    with BackgroundHash(opened(writers.write_zip(tmp_path / "d.zip", files, zipfile.ZIP_STORED))) as hashing:
        assert hashing.wait(120)
        assert hashing.value is None
        assert "00005.png cannot be read" in hashing.problem


def endless(at: Path) -> Path:
    """Images of which one never ends: to read it waits for someone who writes it."""
    folder = writers.write_files(at / "endless", writers.numbered(IMAGES))
    (folder / "00007.png").unlink()
    os.mkfifo(folder / "00007.png")
    return folder


def test_the_block_does_not_wait_for_the_hash(tmp_path: Path) -> None:
    with BackgroundHash(opened(endless(tmp_path))) as hashing:
        assert not hashing.wait(0.01)
        child = hashing._child
    assert child is not None
    assert child.returncode == -signal.SIGKILL
    assert hashing.wait(60)
    assert hashing.value is None


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = """
import sys
from tcm.data import open_dataset
from tcm.data.hashing import BackgroundHash
hashing = BackgroundHash(open_dataset(sys.argv[1], memory_limit=0))
print(hashing._child.pid, flush=True)
hashing.wait(600)
"""
    command = [sys.executable, "-c", script, str(endless(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "it lives on without its parent"
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
