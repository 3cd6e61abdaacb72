"""`tcm watch`: the page that it writes while a run's files change."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tcm.foundation.errors import TcmError
from tcm.report.live import LivePage, remaining
from tcm.report.records import read_run

WATCH = [sys.executable, "-c", "from tcm.cli import main; main()", "watch"]


@pytest.fixture
def halfway(fair_run: Path, tmp_path: Path) -> Path:
    """A run whose third stage trains, and whose fourth waits."""
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    shutil.rmtree(run / "2-continued" / "model")
    shutil.rmtree(run / "2-continued" / "state")
    shutil.rmtree(run / "3-truncated")
    return run


def line(step: int, speed: float) -> str:
    return json.dumps(
        {"step": step, "loss": 0.125, "gradient_norm": 1.0, "gradient_norm_max": 1.0, "images_per_second": speed,
         "loss_by_t": [1.0] * 10, "skipped": 0}
    ) + "\n"  # fmt: skip


def test_the_page_follows_the_run_until_ctrl_c(halfway: Path, failed_run: Path) -> None:
    metrics = halfway / "2-continued" / "metrics.jsonl"
    metrics.write_text(line(1, 16.0))
    shutil.copytree(failed_run / "0-diffusion" / "samples", halfway / "0-diffusion" / "samples", dirs_exist_ok=True)
    process = subprocess.Popen([*WATCH, str(halfway), "--every", "1"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        file = halfway / "live.html"
        assert said.startswith(f"{file}: open it in a browser")
        page = file.read_text("utf-8")
        assert '<meta http-equiv="refresh" content="1">' in page
        assert "<script" not in page
        assert "<strong>continued</strong>, step 1 of 4, loss 0.125, 16 images/s" in page
        assert "Left: <strong>" in page
        assert "data:image/png;base64" in page, "the newest grid"
        with metrics.open("a") as lines:
            lines.write(line(3, 16.0))
        deadline = time.monotonic() + 60
        while "step 3 of 4" not in file.read_text("utf-8"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_it_ends_with_the_run(fair_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    subprocess.run([*WATCH, str(fair_run), "--out", str(out)], check=True)
    page = out.read_text("utf-8")
    assert "All stages are finished" in page
    assert "refresh" not in page


@dataclass
class Page:
    """A live page, and what it looks like."""

    run: Path

    def __post_init__(self) -> None:
        self._live, self._file = LivePage(self.run, self.run / "live.html", 5), self.run / "live.html"

    def current(self) -> str:
        assert self._live.write(), "the run has not finished"
        return self._file.read_text("utf-8")


def test_the_page_knows_whether_the_run_is_being_trained(halfway: Path) -> None:
    page = Page(halfway)
    assert "No process is training it: <code>tcm train" in page.current()
    with FileLock(halfway / ".lock"):
        assert "A process is training it." in page.current()
    assert "No process is training it" in page.current()


def test_what_is_left(halfway: Path) -> None:
    (halfway / "2-continued" / "metrics.jsonl").write_text(line(1, 16.0))  # batch 8: half a second for each step
    left = remaining(read_run(halfway))
    assert left is not None
    assert left.stages["continued"] == pytest.approx(3 * 0.5)
    # A truncated step has the cost of a consistency step: the frozen network takes the place of the student.
    assert left.stages["truncated"] == pytest.approx(4 * 0.5, rel=0.5)
    assert left.total == pytest.approx(sum(left.stages.values()))


def test_the_page_is_made_again_only_for_changed_files(halfway: Path) -> None:
    page = Page(halfway)
    first, written = page.current(), (halfway / "live.html").stat().st_mtime_ns
    assert page.current() == first
    assert (halfway / "live.html").stat().st_mtime_ns == written
    (halfway / "2-continued" / "metrics.jsonl").write_text(line(1, 16.0))
    assert page.current() != first


def test_the_page_of_a_studys_run_follows_the_stages_that_it_shares(halfway: Path, tmp_path: Path) -> None:
    shared = {name: tmp_path / name for name in ("0-diffusion", "1-consistency", "2-continued")}
    for name, folder in shared.items():
        (halfway / name).rename(folder)
    where = {name.partition("-")[2]: f"../{name}" for name in [*shared, "3-truncated"]}
    (halfway / "elsewhere.json").write_text(json.dumps(where))
    page = Page(halfway)
    first = page.current()
    (shared["2-continued"] / "metrics.jsonl").write_text(line(1, 16.0))
    assert page.current() != first


def test_nothing_is_known_before_the_first_numbers(halfway: Path) -> None:
    for stage in ("0-diffusion", "1-consistency", "2-continued"):
        (halfway / stage / "metrics.jsonl").unlink()
    assert remaining(read_run(halfway)) is None


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match=r"holds no recipe\.toml"):
        LivePage(tmp_path, tmp_path / "live.html", 5)
