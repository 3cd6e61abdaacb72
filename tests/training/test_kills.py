"""Must show 1: killed at any moment and started again, a run ends with the same bits as one that nothing disturbed.

TCM_KILLS=20 kills more often than the default.
"""

import os
import random
import signal
import time
from pathlib import Path

from launching import Command, Launcher, fingerprint, lines, tiny

KILLS = int(os.environ.get("TCM_KILLS", "4"))


def test_killed_again_and_again(launcher: Launcher, finished: Path, tmp_path: Path) -> None:
    run, chance = tmp_path / "run", random.Random(0)
    commands = ["train", "digits", *tiny(), "--run", str(run)]
    hits = {"writing a checkpoint": 0, "saving a model": 0, "some moment": 0}
    for kill in range(KILLS):
        command = launcher.start(*commands)
        aim = list(hits)[kill % 3]
        if aim == "writing a checkpoint":
            _wait_for(command, run, "*/state/.writing-*", chance.randrange(1, 3))
        elif aim == "saving a model":
            _wait_for(command, run, "*/.model.*", 1)
        else:
            command.until(lambda: bool(list(run.glob("*/state/.writing-*"))))
            time.sleep(chance.uniform(0, 2))
        command.send(signal.SIGKILL)
        assert command.wait() in (-signal.SIGKILL, 0), command.text
        hits[aim] += 1
    code, text = launcher.run(*commands)
    assert code == 0, text
    assert min(hits["writing a checkpoint"], hits["saving a model"]) > 0
    assert fingerprint(run) == fingerprint(finished)
    for folder in ("0-diffusion", "1-consistency", "2-truncated"):
        logged = lines(run / folder)
        assert [line["step"] for line in logged] == [line["step"] for line in lines(finished / folder)]
        assert logged == lines(finished / folder)


def _wait_for(command: Command, run: Path, pattern: str, times: int) -> None:
    """Wait until something appears for the n-th time."""
    for _ in range(times):
        command.until(lambda: not list(run.glob(pattern)))
        command.until(lambda: bool(list(run.glob(pattern))))
