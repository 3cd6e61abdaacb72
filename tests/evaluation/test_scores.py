"""Records of scores: written, read, compared only under equal conditions."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tcm.evaluation.scores import Score, already_measured, append_scores, compare, differing_conditions, read_scores
from tcm.foundation.errors import TcmError

SCORE = Score(
    kind="fid",
    metric="FID",
    t=None,
    value=2.46,
    deviation=None,
    count=50_000,
    subject="model",
    subject_hash="a" * 64,
    step=None,
    sampling="times 80, fp32",
    conditions="drawn",
    seed=0,
    detector="inception",
    detector_hash="b" * 64,
    preprocessing="TF1 bilinear to 299",
    quantisation="truncated to uint8",
    reference="cifar10",
    reference_hash="c" * 64,
    reference_count=50_000,
    settings="covariance over N - 1",
    note=None,
    versions="tcm 0.1.0",
    time="2026-11-15T00:00:00+00:00",
)


def test_scores_come_back_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "scores.jsonl"
    append_scores(file, [SCORE])
    odd = dataclasses.replace(SCORE, metric="KID", value=0.001, deviation=0.0002, note="FID∞ \u2028 \x85 \x0c")
    append_scores(file, [odd])
    assert file.read_text(encoding="utf-8").count("\n") == 2
    assert read_scores(file) == [SCORE, odd]


def test_a_line_that_a_kill_cut_off_is_left_out_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    append_scores(file, [SCORE, SCORE])
    file.write_bytes(file.read_bytes()[:-20])
    assert read_scores(file) == [SCORE]
    append_scores(file, [SCORE])
    assert read_scores(file) == [SCORE, SCORE]


def test_scores_without_a_kind_are_still_read(tmp_path: Path) -> None:
    """As files had them before; they are comparable with new ones."""
    kinds = {
        "FID": "fid",
        "digits distance": "fid",
        "denoised digits distance": "fid",
        "Fréchet distance in mine": "fid",
        "FID∞": "fid-infinity",
        "KID": "kid",
        "kernel distance in digits": "kid",
        "Inception score": "is",
        "class score in digits": "is",
        "precision": "precision",
        "recall": "recall",
    }
    file = tmp_path / "scores.jsonl"
    for metric in kinds:
        fields = dataclasses.asdict(dataclasses.replace(SCORE, metric=metric))
        del fields["kind"]
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(fields) + "\n")
    found = read_scores(file)
    assert {score.metric: score.kind for score in found} == kinds
    assert differing_conditions(found[0], SCORE) == []


def test_scores_that_say_nothing_of_conditions_are_still_read(tmp_path: Path) -> None:
    """As files had them before: given conditions were a part of the sampling's text."""
    file = tmp_path / "scores.jsonl"
    for sampling in ("times 80, fp32", "times 80, fp32, given conditions", None):
        fields = dataclasses.asdict(dataclasses.replace(SCORE, sampling=sampling))
        del fields["conditions"]
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(fields) + "\n")
    found = read_scores(file)
    assert [score.sampling for score in found] == ["times 80, fp32", "times 80, fp32", None]
    assert [score.conditions for score in found] == ["drawn", "given", None]
    assert [score.way for score in found] == ["times 80, fp32", "times 80, fp32, given conditions", ""]


def test_scores_without_a_step_are_still_read(tmp_path: Path) -> None:
    """As files had them before: a checkpoint's step was only a part of its name."""
    steps = {"truncated@300": 300, "truncated": None, "runs/me@home/model": None, "@": None}
    file = tmp_path / "scores.jsonl"
    for subject in steps:
        fields = dataclasses.asdict(dataclasses.replace(SCORE, subject=subject))
        del fields["step"]
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(fields) + "\n")
    found = read_scores(file)
    assert {score.subject: score.step for score in found} == steps
    assert differing_conditions(found[0], SCORE) == []


def test_scores_with_equal_conditions_are_compared() -> None:
    better = dataclasses.replace(
        SCORE, value=2.05, subject="other", subject_hash="d" * 64, sampling="times 80, 1, fp32"
    )
    (pair,) = compare([SCORE], [SCORE, better])
    assert (pair.first.value, pair.second.value) == (2.46, 2.05)


def test_scores_at_different_times_are_not_compared() -> None:
    low, high = (dataclasses.replace(SCORE, metric="dFID", t=t) for t in (0.2, 1.0))
    assert (SCORE.label, low.label, high.label) == ("FID", "dFID at t=0.2", "dFID at t=1")
    assert differing_conditions(low, high) == ["t: 0.2 and 1.0"]
    assert [pair.second.t for pair in compare([low, high], [high])] == [1.0]
    with pytest.raises(TcmError, match=r"no metric in common \(dFID at t=0\.2; dFID at t=1\)"):
        compare([low], [high])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 5000),
        ("detector_hash", "e" * 64),
        ("preprocessing", "antialiased"),
        ("quantisation", "rounded"),
        ("reference_hash", "f" * 64),
        ("reference_count", 10_000),
        ("settings", "covariance over N"),
    ],
)
def test_scores_whose_conditions_differ_are_refused(field: str, value: object) -> None:
    other = dataclasses.replace(SCORE, **{field: value})
    with pytest.raises(TcmError, match=rf"cannot be compared.*{field}: "):
        compare([SCORE], [other])
    assert len(differing_conditions(SCORE, other)) == 1


FREE = {"value", "deviation", "note", "versions", "time", "subject", "step", "reference"}
"""The result, names, and when."""


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Score)])
def test_only_a_score_under_the_same_conditions_is_already_measured(field: str) -> None:
    """Of the same count in another detector's features, for example, is not."""
    value = getattr(SCORE, field)
    other = dataclasses.replace(SCORE, **{field: "x" if value is None or isinstance(value, str) else value + 1})
    assert already_measured(SCORE, [other]) == (other if field in FREE else None)
    assert already_measured(SCORE, [other, SCORE]) is not None
    assert differing_conditions(SCORE, other) == [] or field not in FREE


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match="does not exist"):
        read_scores(tmp_path / "none.jsonl")
    file = tmp_path / "scores.jsonl"
    file.write_text("{}\n")
    with pytest.raises(TcmError, match="line 1 is not a score"):
        read_scores(file)
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TcmError, match="line 1 is not JSON"):
        read_scores(file)
    with pytest.raises(TcmError, match="no metric in common"):
        compare([SCORE], [dataclasses.replace(SCORE, metric="KID")])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.text(max_size=60), st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists).map(json.dumps)
    )
)
def test_any_file_gives_scores_or_our_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "scores.jsonl"
    file.write_text(content + "\n", encoding="utf-8")
    if content.splitlines():
        with pytest.raises(TcmError, match="line"):
            read_scores(file)
    else:
        assert read_scores(file) == []
