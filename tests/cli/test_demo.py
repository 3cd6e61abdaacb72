"""The demo, made small: stages, scores, report, summary; interrupted, it resumes; repeated, it shows what is there."""

import json
import shlex
import signal
from collections import Counter
from pathlib import Path

import pytest
from launching import Launcher

pytestmark = pytest.mark.long

STAGES = ("diffusion", "consistency", "truncated", "continued")
SMALL = ["network.channels=8", "network.blocks=1", "diffusion.warmup=0"]
SHORT = ["*.steps=4", "*.batch=8", *(f"{stage}.watched_images=16" for stage in STAGES[1:])]
TINY = [*SMALL, *SHORT]


def command(run: Path, *more: str) -> list[str]:
    return ["demo", *TINY, *more, "--run", str(run), "--samples", "200"]


def demo(launcher: Launcher, run: Path) -> str:
    """Where there is no npm: the page that generates takes seconds, and has tests of its own."""
    code, text = launcher.run(*command(run), environment={"PATH": str(run), "TCM_DATA": str(run / "cache")})
    assert code == 0, text
    return text


def interrupted_demo(launcher: Launcher, run: Path) -> str:
    """Ctrl-C, as a terminal sends it to all processes, when stage 0 begins."""
    started = launcher.start(*command(run))
    started.until(lambda: (run / "0-diffusion" / "state" / "step-0").exists())
    started.send(signal.SIGINT, to_its_processes=True)
    assert started.wait() == 130, started.text
    return started.text


def test_demo_trains_measures_shows_and_repeats(tmp_path: Path) -> None:
    run, launcher = tmp_path / "demo", Launcher(tmp_path)
    assert (
        interrupted_demo(launcher, run).splitlines()[-1]
        == f"stopped; resume with: tcm demo {shlex.join(TINY)} --run {run} --samples 200"
    )
    assert not (run / "1-consistency").exists()
    assert not (run / "report.html").exists()

    first = demo(launcher, run)
    assert "Try next" in first
    assert (run / "report.html").stat().st_size > 10_000
    page = run / "playground.html"
    assert f"To generate in your browser: tcm playground {run / '2-truncated' / 'model'} --out {page}" in first
    assert not page.exists()
    scores = (run / "scores.jsonl").read_text()
    measured = Counter(json.loads(line)["subject"] for line in scores.splitlines())
    one_and_two_steps_and_eight_times = 2 + 8
    assert measured == {"diffusion": 1} | dict.fromkeys(STAGES[1:], one_and_two_steps_and_eight_times)

    written = (run / "report.html").stat().st_mtime_ns
    assert demo(launcher, run).splitlines()[-3:] == first.splitlines()[-3:]
    assert (run / "report.html").stat().st_mtime_ns == written
    assert (run / "scores.jsonl").read_text() == scores

    code, text = launcher.run(*command(run, "seed=1"))
    assert code == 2
    assert "was started with another recipe (seed: 0 → 1)" in text
