"""The demo, made small: all stages, scores, report and summary; repeated, it shows what is there."""

import subprocess
import sys
from pathlib import Path

TINY = [
    "network.channels=8",
    *(f"{s}.{key}" for s in ("diffusion", "consistency", "truncated", "continued") for key in ("steps=4", "batch=8")),
    "diffusion.warmup=0",
]  # fmt: skip


def demo(run: Path) -> str:
    command = [sys.executable, "-m", "tcm", "demo", *TINY, "--run", str(run), "--samples", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_trains_measures_shows_and_repeats(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    first = demo(run)
    assert "Try next" in first
    assert (run / "report.html").stat().st_size > 10_000
    scores = (run / "scores.jsonl").read_text()
    for stage in ("diffusion", "consistency", "truncated", "continued"):
        assert f'"subject": "{stage}"' in scores
    written = (run / "report.html").stat().st_mtime_ns
    assert demo(run).splitlines()[-3:] == first.splitlines()[-3:]
    assert (run / "report.html").stat().st_mtime_ns == written
    assert (run / "scores.jsonl").read_text() == scores
