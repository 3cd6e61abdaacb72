"""Scores are read, matched by the weights and the way of sampling, and never invented."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tcm.cli.main import app
from tcm.evaluation.scores import Score, append_scores, read_scores
from tcm.report.drawing import ObservedRun, observe_run
from tcm.report.headline import denoising_curves, headline_rows, largest_group, value_text
from tcm.report.records import read_run


@pytest.fixture(scope="module")
def observed(fair_run: Path) -> ObservedRun:
    return observe_run(read_run(fair_run))


def test_rows_hold_the_file_s_scores(observed: ObservedRun, fair_run: Path) -> None:
    rows = headline_rows([observed])
    written = {score.subject: score.value for score in read_scores(fair_run / "scores.jsonl") if score.sampling}
    shown = {row.stage.folder.name: row.score.value for row in rows if row.score is not None}
    assert shown == written
    assert [row.evaluations for row in rows] == [35, 1, 2, 1, 2, 1, 2]
    assert [row.score is None for row in rows] == [False, False, True, False, True, False, True]


def test_the_command_measures_what_is_missing(observed: ObservedRun, fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    copied = replace(observed, record=read_run(run))
    copied = replace(
        copied, drawings=[replace(d, stage=s) for d, s in zip(observed.drawings, copied.record.stages, strict=True)]
    )
    missing = headline_rows([copied])[-1]
    assert missing.score is None
    program, *arguments = shlex.split(missing.command)
    assert program == "tcm"
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    measured = headline_rows([replace(copied, record=read_run(run))])[-1]
    assert measured.score is not None
    assert measured.score.count == 80


def test_scores_of_other_weights_are_not_shown(observed: ObservedRun) -> None:
    foreign = [replace(score, subject_hash="0" * 64) for score in observed.record.scores]
    rows = headline_rows([replace(observed, record=replace(observed.record, scores=foreign))])
    assert all(row.score is None for row in rows)


def test_incomparable_scores_are_not_put_side_by_side(observed: ObservedRun, tmp_path: Path) -> None:
    scores = [score for score in observed.record.scores if score.sampling]
    other = replace(scores[1], count=90, value=0.0, time="9999")
    append_scores(tmp_path / "scores.jsonl", [*scores, other])
    read = read_scores(tmp_path / "scores.jsonl")
    assert largest_group(read) == scores
    rows = headline_rows([replace(observed, record=replace(observed.record, scores=read))])
    assert {row.score.count for row in rows if row.score is not None} == {80}
    alone = [replace(score, count=90) if score == scores[1] else score for score in scores]
    rows = headline_rows([replace(observed, record=replace(observed.record, scores=alone))])
    assert [value_text(row) for row in rows].count("not comparable") == 1
    assert value_text(rows[1]) == "not comparable"
    assert "-n 80" in rows[1].command


def test_drawn_and_given_conditions_are_not_mixed(observed: ObservedRun) -> None:
    """The headline shows those of more lines; a score of one class is never one of them."""
    scores = [score for score in observed.record.scores if score.sampling]
    assert {score.conditions for score in scores} == {"drawn"}
    given = [replace(score, conditions="given", value=score.value + 1) for score in scores]

    def shown(scores: list[Score]) -> list[str | None]:
        rows = headline_rows([replace(observed, record=replace(observed.record, scores=scores))])
        return [row.score.conditions if row.score else value_text(row) for row in rows if row.evaluations != 2]

    assert shown([given[0], *scores[1:]]) == ["not comparable", "drawn", "drawn", "drawn"]
    assert shown([scores[0], *given[1:]]) == ["not comparable", "given", "given", "given"]
    without = replace(scores[0], conditions=None)
    assert shown([without, *given[1:]]) == [None, "given", "given", "given"]
    chosen = replace(scores[0], conditions="chosen")
    assert shown([chosen, *scores[1:]]) == ["not measured", "drawn", "drawn", "drawn"]


def test_a_later_score_replaces_an_earlier_one(observed: ObservedRun) -> None:
    scores = observed.record.scores
    later = replace(scores[0], value=0.125, time="9999")
    rows = headline_rows([replace(observed, record=replace(observed.record, scores=[*scores, later]))])
    assert rows[0].score is not None
    assert rows[0].score.value == 0.125


def test_denoising_curves(observed: ObservedRun) -> None:
    curves = denoising_curves(observed)
    assert [curve.stage.name for curve in curves] == ["consistency", "continued", "truncated"]
    assert all(curve.times == [0.2, 1.0, 5.0] for curve in curves)
    truth = {score.label: score.value for score in observed.record.scores if score.subject == "3-truncated"}
    assert curves[-1].values[1] == truth["denoised digits distance at t=1"]
