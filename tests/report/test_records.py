"""What is read from a run's folder."""

import json
import shutil
from pathlib import Path

import pytest

from tcm.foundation.errors import TcmError
from tcm.report.records import read_run
from tcm.training.checkpoint import newest_step


def test_finished_run(fair_run: Path) -> None:
    run = read_run(fair_run)
    assert [stage.name for stage in run.stages] == ["diffusion", "consistency", "continued", "truncated"]
    assert {stage.status for stage in run.stages} == {"finished"}
    assert [stage.step for stage in run.stages] == [6, 6, 4, 4]
    assert all(len(stage.starts) == 1 and "torch" in stage.starts[0].versions for stage in run.stages)
    assert len(run.scores) == 4 + 3 * 3


def test_failed_and_waiting_stages(failed_run: Path) -> None:
    run = read_run(failed_run)
    assert [stage.status for stage in run.stages] == ["finished", "failed", "not begun", "not begun"]
    assert "gradient norm" in run.stages[1].lines[-1]["reason"] or "loss" in run.stages[1].lines[-1]["reason"]


def test_a_failed_stage_that_resumes_is_no_longer_failed(failed_run: Path, tmp_path: Path) -> None:
    shutil.copytree(failed_run, tmp_path / "run")
    metrics = tmp_path / "run" / "1-consistency" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 60, "event": "skipped", "reason": "…"}\n')
    assert read_run(tmp_path / "run").stages[1].status == "unfinished"


def test_unfinished_stage_with_a_line_cut_short(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    shutil.rmtree(run / "3-truncated" / "model")
    metrics = run / "3-truncated" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    stage = read_run(run).stages[-1]
    assert (stage.status, stage.step, newest_step(stage.folder)) == ("unfinished", 4, 4), "the checkpoint is newer"
    shutil.rmtree(run / "3-truncated" / "state")
    stage = read_run(run).stages[-1]
    assert (stage.status, stage.step, newest_step(stage.folder)) == ("unfinished", 2, 0)


def test_wall_time_is_the_time_of_the_updates(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    line = {"loss": 1.0, "images_per_second": 16.0}  # batch 8: half a second for each update
    lines = [line | {"step": 10, "skipped": 0}, {"step": 15, "spread": 0.1}, line | {"step": 20, "skipped": 4}]
    (run / "0-diffusion" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert read_run(run).stages[0].seconds == pytest.approx(10 * 0.5 + 6 * 0.5)


def test_damaged_scores_are_named_and_left_out(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    (run / "scores.jsonl").write_text("{}\n")
    record = read_run(run)
    assert record.scores == []
    assert "line 1" in str(record.scores_problem)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match=r"holds no recipe\.toml"):
        read_run(tmp_path)
