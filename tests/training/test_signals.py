"""Must show 4: signals save and stop with 128 + their number; a second Ctrl-C stops at once; one training per run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inprocess import train
from launching import FOLDERS, Launcher, lines, losses, tiny, tiny_recipe

from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.foundation.signals import Stopped, StopRequest, stop_requests
from tcm.training import locking
from tcm.training.checkpoint import Checkpoints

LONG = tiny(1000, "diffusion.checkpoint_every=1000", "diffusion.sample_every=0")


def state(run: Path) -> list[str]:
    return sorted(path.name for path in (run / FOLDERS[0] / "state").glob("step-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_saves_and_stops(launcher: Launcher, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "a run"
    command = launcher.start("train", "digits", *LONG, "--run", str(run))
    metrics = run / FOLDERS[0] / "metrics.jsonl"
    command.until(lambda: metrics.exists() and bool(metrics.read_text()))
    command.send(number)
    assert command.wait() == {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}[number.name], command.text
    *said, saved, resume = command.text.splitlines()
    assert said.count("finishing this step, then saving (press again to stop without saving)") == 1
    assert resume == f"resume with: tcm train '{run}'"
    assert saved.endswith(f"{number.name}: saved and stopped")
    (first, last) = state(run)
    assert first == "step-0"
    assert int(last.removeprefix("step-")) >= lines(run / FOLDERS[0])[-1]["step"]


def test_a_signal_before_the_first_step(launcher: Launcher, tmp_path: Path) -> None:
    """Also while data is opened or models are built: the stage takes one step, saves and stops."""
    run = tmp_path / "run"
    command = launcher.start("train", "digits", *LONG, "--run", str(run))
    command.until(lambda: (run / ".lock").exists())
    command.send(signal.SIGTERM)
    assert command.wait() == 143, command.text
    assert state(run) == ["step-0", "step-1"]


def test_a_second_ctrl_c_stops_at_once(launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = ["diffusion.batch=4096", "diffusion.log_every=1", "diffusion.sample_every=0"]
    command = launcher.start("train", "digits", *tiny(1000, *slow), "--run", str(run))
    command.until(lambda: (run / FOLDERS[0] / "state" / "step-0").exists())
    time.sleep(0.3)
    command.send(signal.SIGINT)
    time.sleep(0.3)
    command.send(signal.SIGINT)
    assert command.wait() == 130, command.text
    assert "Traceback" not in command.text
    assert state(run) == ["step-0"]
    assert Checkpoints(run / FOLDERS[0] / "state", 2, Processes(None)).newest().damage == ()


def test_torchruns_second_ctrl_c_is_the_first() -> None:
    request = StopRequest(patient=True)
    request.note(signal.SIGINT, None)
    request.note(signal.SIGINT, None)
    assert request.by == "SIGINT"
    impatient = StopRequest(patient=False)
    impatient.note(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        impatient.note(signal.SIGINT, None)


def test_the_first_signal_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """By the handler itself, while the code that it interrupts is still busy; by one of many processes only."""
    with stop_requests(patient=False):
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == "finishing this step, then saving (press again to stop without saving)\n"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with stop_requests(patient=True):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == "finishing this step, then saving\n"
    with stop_requests(patient=True, quiet=True) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert capfd.readouterr().err == ""


def test_under_torchrun_a_stop_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start the processes again, and the run would go on."""
    assert [Stopped(by).exit_code for by in ("SIGINT", None)] == [130, 143]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert Stopped("SIGUSR1").exit_code == 0


def test_the_handlers_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests(patient=False) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop
        assert stop.by == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_trainings_of_one_run(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = launcher.start("train", "digits", *LONG, "--run", str(run))
    command.until(lambda: (run / FOLDERS[0] / "state" / "step-0").exists())
    monkeypatch.setattr(locking, "LOCK_PATIENCE", 0.1)
    with pytest.raises(TcmError, match=r"run is being trained by another process; wait for it or choose another --run"):
        train(tiny_recipe(), run)
    assert capfd.readouterr().err.startswith(f"{run} is being trained by another process; waiting")
    command.send(signal.SIGKILL)
    command.wait()
    assert command.text.count("diffusion") == len(losses(run / FOLDERS[0]))
    # The lock dies with its holder; the recipe is what stands in the way now.
    with pytest.raises(TcmError, match=r"was started with another recipe \(.*diffusion.steps: 1000 → 12"):
        train(tiny_recipe(), run)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process(tmp_path: Path, finished: Path) -> None:
    """In torch 2.13 processes that torchrun starts again sometimes fail to find each other in gloo, or wait forever, in
    a script of ten lines without tcm too: then it is tried again."""
    attempts = (restarted_by_torchrun(tmp_path / f"attempt-{number}") for number in range(4))
    text = next((text for text in attempts if text is not None), "torchrun failed four times")
    assert "resuming from step" in text
    (run,) = (path.parent for path in tmp_path.glob("attempt-*/run/2-truncated/model"))
    for folder in FOLDERS:
        assert losses(run.parent / folder) == pytest.approx(losses(finished / folder), rel=1e-4)


def restarted_by_torchrun(folder: Path, patience: float = 90) -> str | None:
    """The output of two processes of which one was killed once; None if they did not find each other again."""
    folder.mkdir()
    words = ["--nproc-per-node", "2", "--max-restarts", "2", "-m", "--", "tcm", "train", "digits", *tiny()]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--run", str(folder / "run")]
    log = folder / "output.txt"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as torchrun:
        while not (folder / "run" / FOLDERS[0] / "state" / "step-8").exists():
            assert torchrun.poll() is None, log.read_text()
            time.sleep(0.05)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        try:
            return log.read_text() if torchrun.wait(patience) == 0 else None
        except subprocess.TimeoutExpired:
            torchrun.terminate()
            return None
