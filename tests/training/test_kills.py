"""Must show 1: killed at any moment and started again, a run ends with the same bits as one that nothing disturbed.

TCM_KILLS=20 kills more often than the default.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from launching import FOLDERS, Command, Launcher, fingerprint, lines, tiny

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("TCM_KILLS", "4"))


AIMS = ("*/state/.writing-*", "*/.model.*", "some moment")
"""A checkpoint being written, a model being saved, anything else."""


def test_killed_again_and_again(launcher: Launcher, finished: Path, tmp_path: Path) -> None:
    run, chance = tmp_path / "run", random.Random(KILLS)
    arguments = ["train", "digits", *tiny(), "--run", str(run)]
    kills = 0
    while kills < KILLS:
        command = launcher.start(*arguments)
        aim = AIMS[kills % len(AIMS)]
        if aim == "some moment":
            time.sleep(chance.uniform(0, 4))
        else:
            _wait_for(command, run, aim, chance.randrange(1, 3))
        command.send(signal.SIGKILL)
        if command.wait() == 0:  # it was faster: look at its end, and begin again
            _check_equal(run, finished)
            shutil.rmtree(run)
        else:
            assert command.wait() == -signal.SIGKILL, command.text
            kills += 1
    code, text = launcher.run(*arguments)
    assert code == 0, text
    _check_equal(run, finished)


def _check_equal(run: Path, finished: Path) -> None:
    assert fingerprint(run) == fingerprint(finished)
    for folder in FOLDERS:
        assert lines(run / folder) == lines(finished / folder)


def _wait_for(command: Command, run: Path, pattern: str, times: int) -> None:
    """Wait until something appears for the n-th time."""
    for _ in range(times):
        command.until(lambda: not list(run.glob(pattern)))
        command.until(lambda: bool(list(run.glob(pattern))))
