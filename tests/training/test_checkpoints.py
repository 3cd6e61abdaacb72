"""Must show 4: damaged checkpoints and a full disk."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from inprocess import ALONE, begin, events, train
from launching import FOLDERS, Launcher, fingerprint, tiny, tiny_recipe

from tcm.training.checkpoint import Checkpoints, Position, kept_checkpoints
from tcm.training.guard import GuardState

pytestmark = pytest.mark.long


def cut(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)


def flip(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def lose_tensors(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    file.unlink()


def lose_checksums(checkpoint: Path) -> None:
    (checkpoint / "checksums.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "does not match its checksum"),
        (flip, "does not match its checksum"),
        (lose_tensors, "is missing"),
        (lose_checksums, "checksums.json is missing or unreadable"),
    ],
)
def test_a_damaged_newest_checkpoint(
    finished: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    """It is named, the one before it is used, and the end is the same."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    stage = run / FOLDERS[2]
    shutil.rmtree(stage / "model")
    damage(stage / "state" / "step-12")
    said = train(tiny_recipe(), run)
    assert f"{stage}/state/step-12 is damaged" in said
    assert reason in said
    assert "resuming from step 8" in said
    assert [event["event"] for event in events(stage) if event["event"] == "damaged"] == ["damaged"]
    assert fingerprint(run) == fingerprint(finished)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_damaged_share_of_a_checkpoint(launcher: Launcher, tmp_path: Path, readers: int) -> None:
    """Each process has written a file and its checksum; a flipped bit in any file is found by any number of readers."""
    run = tmp_path / "run"
    words = tiny(4, 'order=["diffusion"]', "diffusion.checkpoint_every=2", "diffusion.sample_every=0")
    arguments = ("train", "digits", *(word for word in words if "consistency" not in word and "truncated" not in word))
    ended = launcher.run_ranks(2, *arguments, "--run", str(run))
    assert [code for code, _ in ended] == [0, 0], ended
    newest = run / FOLDERS[0] / "state" / "step-4"
    files = sorted(file.name for file in newest.iterdir())
    assert sorted(json.loads((newest / "checksums.json").read_text())) == [
        name for name in files if name != "checksums.json"
    ]
    first, second = (newest / name for name in files if name.endswith(".safetensors"))
    assert 0.5 < first.stat().st_size / second.stat().st_size < 2, "the processes share the work"
    content = bytearray(second.read_bytes())
    content[-5] ^= 1
    second.write_bytes(content)
    shutil.rmtree(run / FOLDERS[0] / "model")
    ended = launcher.run_ranks(readers, *arguments, "--run", str(run))
    assert [code for code, _ in ended] == [0] * readers, ended
    assert f"step-4 is damaged ({second.name} does not match its checksum); it is skipped" in ended[0][1]
    assert "resuming from step 2" in ended[0][1]


def test_all_checkpoints_damaged(finished: Path, tmp_path: Path) -> None:
    """The stage starts again from step 0 and says so; other files beside the checkpoints do no harm."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    state = run / FOLDERS[2] / "state"
    shutil.rmtree(state.parent / "model")
    for checkpoint in state.glob("step-*"):
        cut(checkpoint)
    (state / ".DS_Store").touch()
    (state / "step-old").mkdir()
    (state / "damaged-step-12").mkdir()
    (state / ".writing-12").mkdir()
    assert "resuming from step 0" in train(tiny_recipe(), run)
    (state / "step-old").rmdir()
    assert fingerprint(run) == fingerprint(finished)
    assert not (state / ".writing-12").exists()


def test_what_a_stop_saved_in_between_takes_no_place(tmp_path: Path) -> None:
    """After an interruption at step 5 the same checkpoints are kept as without it; the last step may be any."""
    kept = []
    for steps in ((0, 4, 5, 8, 10), (0, 4, 8, 10)):
        checkpoints = Checkpoints(tmp_path / str(len(steps)), 3, ALONE, every=4)
        for step in steps:
            checkpoints.save({"weights": torch.ones(2)}, Position(step=step))
        kept.append(list(kept_checkpoints(checkpoints.folder)))
    assert kept == [[4, 8, 10], [4, 8, 10]]


def test_a_checkpoint_holds_everything(tmp_path: Path) -> None:
    """Written, read into another trainer: the same tensors and the same position."""
    loop, _ = begin(tmp_path, "diffusion")
    loop.trainer.step(0, loop.batches.at(0))
    loop.trainer.retry, loop.trainer.learner.guard = 2, GuardState(scale=1 / 3, seen=7, in_a_row=1, skipped=4)
    checkpoints = Checkpoints(tmp_path / "kept", 2, ALONE)
    for step in (1, 5, 10, 100):
        checkpoints.save(loop.trainer.tensors(), loop.trainer.position(step))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-10", "step-100"]
    other, _ = begin(tmp_path, "diffusion")
    newest = checkpoints.newest().path
    assert newest is not None
    position = checkpoints.load(newest, other.trainer.tensors())
    assert position == Position(step=100, retry=2, guard=GuardState(1 / 3, 7, 1, 4))
    ours, theirs = loop.trainer.tensors(), other.trainer.tensors()
    assert len(ours) > 100
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("this user may not mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(launcher: Launcher, small_disk: Path, finished: Path) -> None:
    run, filler = small_disk / "run", small_disk / "filler"
    command = launcher.start("train", "digits", *tiny(), "--run", str(run))
    command.until(lambda: (run / FOLDERS[0] / "state" / "step-4").exists())
    command.send(signal.SIGTERM)
    assert command.wait() == 143
    kept = sorted((run / FOLDERS[0] / "state").iterdir())
    for free, unwritten in ((100_000, "state/step-"), (0, "0-diffusion/metrics.jsonl")):
        status = os.statvfs(small_disk)
        filler.write_bytes(bytes(status.f_bavail * status.f_frsize - free))
        code, text = launcher.run("train", str(run))
        assert code == 2, text
        error = text.splitlines()[-1]
        assert error.startswith("error: ")
        assert unwritten in error
        assert "free some space" in error
        assert error.endswith("before is intact")
        assert sorted((run / FOLDERS[0] / "state").iterdir()) == kept
        filler.unlink()
    code, text = launcher.run("train", str(run))
    assert code == 0, text
    assert fingerprint(run) == fingerprint(finished)
