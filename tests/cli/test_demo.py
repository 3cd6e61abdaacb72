"""The demo, made small: stages, scores, report, summary; interrupted, it resumes; repeated, it shows what is there."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

STAGES = ("diffusion", "consistency", "truncated", "continued")
TINY = ["diffusion.warmup=0", *(f"{stage}.{key}" for stage in STAGES for key in ("steps=4", "batch=8"))]


def command(run: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tcm", "demo", *TINY, *more, "--run", str(run), "--samples", "200"]


def demo(run: Path) -> str:
    done = subprocess.run(command(run), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interrupted_demo(run: Path) -> str:
    """Ctrl-C, as a terminal sends it to all processes, when stage 0 begins."""
    started = subprocess.Popen(command(run), stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not (run / "0-diffusion" / "state" / "step-0").exists():
        assert started.poll() is None
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGINT)
    text, _ = started.communicate(timeout=600)
    assert started.returncode == 0, text
    return text


def test_demo_trains_measures_shows_and_repeats(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    assert interrupted_demo(run).splitlines()[-1] == f"stopped; resume with: tcm demo {' '.join(TINY)} --run {run}"
    assert not (run / "report.html").exists()

    first = demo(run)
    assert "Try next" in first
    assert (run / "report.html").stat().st_size > 10_000
    scores = (run / "scores.jsonl").read_text()
    measured = Counter(json.loads(line)["subject"] for line in scores.splitlines())
    one_and_two_steps_and_eight_times = 2 + 8
    assert measured == {"diffusion": 1} | dict.fromkeys(STAGES[1:], one_and_two_steps_and_eight_times)

    written = (run / "report.html").stat().st_mtime_ns
    assert demo(run).splitlines()[-3:] == first.splitlines()[-3:]
    assert (run / "report.html").stat().st_mtime_ns == written
    assert (run / "scores.jsonl").read_text() == scores

    other = subprocess.run(command(run, "seed=1"), capture_output=True, text=True)
    assert other.returncode == 2
    assert "was started with another recipe (seed: 0 → 1)" in other.stderr
