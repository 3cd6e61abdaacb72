"""`tcm report` for runs of all kinds: one file that holds everything and points nowhere."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from pages import Page, check
from typer.testing import CliRunner

from tcm.cli.main import app
from tcm.data import to_uint8
from tcm.evaluation.scores import read_scores
from tcm.method.conditions import Classes
from tcm.recipes.resolve import resolve, to_toml
from tcm.report.drawing import COLUMNS, observe_run
from tcm.report.records import read_run
from tcm.training.rounding import Rounding
from tcm.weights import Model

ALL = [
    "Results",
    "Same seeds",
    "Each condition",
    "From noise to image",
    "The trade-off",
    "When to truncate",
    "Stability",
    "Loss by noise level",
    "Between two noises",
    "Is it memorising?",
    "How it was made",
]


def report(*arguments: str | Path) -> Page:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    where = Path(result.stdout.strip().removeprefix("report: "))
    return check(Page(where))


def test_finished_run(fair_run: Path) -> None:
    page = report(fair_run)
    assert page.headings == ALL
    scores = [score for score in read_scores(fair_run / "scores.jsonl") if score.sampling]
    for score in scores:
        assert f"{score.value:,.{2 if score.value < 100 else 0}f}" in page.text
    assert page.text.count("not measured") == 3
    best = min((score for score in scores if str(score.sampling).startswith("times")), key=lambda score: score.value)
    assert f"The distance to the data with one evaluation: {best.subject[2:]}" in page.text
    drawn = page.source.partition("From noise to image</h2>")[2].partition("</section>")[0]
    rows = [re.sub(r"<small>(.*), t = .*", r", \1", row) for row in re.findall(r'class="label">(.*?)</div>', drawn)]
    assert rows == [f"{steps}, seed 0" for steps in ("1 step", "2 steps")] + [f"4 steps, seed {n}" for n in range(3)]


def test_rounding_of_stages_in_another_precision(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    for stage, rounding in {
        "0-diffusion": Rounding("bf16", 0.998),
        "3-truncated": Rounding("fp16", 0.876, (*[None] * 8, 0.543, None)),
    }.items():
        metrics = run / stage / "metrics.jsonl"
        metrics.write_text(json.dumps(rounding.line()) + "\n" + metrics.read_text())
    page = report(run)
    assert page.headings == [*ALL[: ALL.index("Stability") + 1], "Rounding", *ALL[ALL.index("Stability") + 1 :]]
    text = " ".join(page.text.split())
    assert "diffusion bf16 1.00 –" in text
    assert "truncated fp16 0.88 0.54" in text


def test_run_without_scores_or_data(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    (run / "scores.jsonl").unlink()
    recipe = (run / "recipe.toml").read_text().replace('path = "digits"', 'path = "/nowhere/digits"')
    (run / "recipe.toml").write_text(recipe)
    page = report(run, "--out", tmp_path / "deep" / "er" / "report.html")
    assert page.text.count("not measured") == 7 + 1
    assert "tcm eval" in page.text
    assert "there is no file or folder /nowhere/digits" in page.text


def test_run_in_progress(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    shutil.rmtree(run / "3-truncated")
    shutil.rmtree(run / "2-continued" / "model")
    page = report(run)
    assert "step 4 of 4" in page.text
    assert "not begun" in page.text
    assert f"tcm train {run}" in page.text


@pytest.mark.parametrize("left", ["nothing", "an empty stage", "an empty metrics file"])
def test_run_that_has_hardly_begun(fair_run: Path, tmp_path: Path, left: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(fair_run / "recipe.toml", run)
    if left != "nothing":
        (run / "0-diffusion").mkdir()
    if left == "an empty metrics file":
        (run / "0-diffusion" / "metrics.jsonl").touch()
    page = report(run)
    assert page.headings == ["Results", "The trade-off", "How it was made"]
    assert "No stage has finished" in page.text


def test_warnings_are_red_and_not_a_green_end(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    metrics = run / "3-truncated" / "metrics.jsonl"
    flat = {"step": 4, "event": "featureless", "reason": "the samples are <flat>"}
    metrics.write_text(metrics.read_text() + json.dumps({"step": 4, "spread": 0.1}) + "\n" + json.dumps(flat) + "\n")
    page = report(run)
    assert page.source.count('<span class="finished">finished</span>') == 2, "continued averages over 10,000 steps"
    assert '<span class="failed">finished, with warnings</span>' in page.source
    assert "truncated may not have learned what it should the samples are &lt;flat&gt;" in page.text


def test_an_interrupted_run_shows_its_checkpoint(fair_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fair_run, run)
    shutil.rmtree(run / "3-truncated" / "model")
    metrics = run / "3-truncated" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(True)[:1]))
    text = report(run).text
    assert "step 4 of 4" in text
    assert "resumes it from its newest checkpoint, step 4." in text


def test_failed_run(failed_run: Path) -> None:
    page = report(failed_run)
    assert "consistency failed at step" in page.text
    assert "learning_rate = 1e+30" in re.sub(r"\s+=", " =", page.text)
    assert "Same seeds" in page.headings
    assert "Between two noises" not in page.headings


@pytest.fixture
def started_run(fair_run: Path, tmp_path: Path) -> Path:
    """The consistency stage of a run as one of its own, with no --init noted yet."""
    run = tmp_path / "started"
    shutil.copytree(fair_run / "1-consistency", run / "1-consistency")
    recipe = resolve(str(fair_run / "recipe.toml"))
    consistency = recipe.stages["consistency"].model_copy(update={"init": "init", "teacher": "init"})
    (run / "recipe.toml").write_text(to_toml(recipe.model_copy(update={"stages": {"consistency": consistency}})))
    return run


def test_the_model_that_a_run_starts_from(started_run: Path, fair_run: Path) -> None:
    """Its samples of the same seeds and conditions come first; one that cannot be loaded any more is named."""
    assert "--init" not in report(started_run).text
    origin = fair_run / "0-diffusion" / "model"
    (started_run / "init.txt").write_text(str(origin))
    observed = observe_run(read_run(started_run))
    (way, images), *others = observed.origin.ways
    same = Model.load(origin).sample(steps=18, seeds=range(COLUMNS), condition=Classes(10).spread(COLUMNS))
    assert (way, others) == ("Heun", [])
    assert torch.equal(images, to_uint8(same))
    assert f"The model given with --init, {origin}, is in the rows named start." in report(started_run).text
    (started_run / "init.txt").write_text(str(started_run / "gone"))
    text = report(started_run).text
    assert f"The model given with --init, {started_run / 'gone'}, gives no images:" in text


def test_other_images_without_classes_and_a_strange_name(colour_run: Path) -> None:
    page = report(colour_run)
    assert page.headings == [
        "Results",
        "Same seeds",
        "The trade-off",
        "Loss by noise level",
        "Is it memorising?",
        "How it was made",
    ]
    assert "<h1>&lt;colour&gt; &amp; run</h1>" in page.source


def test_runs_side_by_side(fair_run: Path, failed_run: Path, colour_run: Path, tmp_path: Path) -> None:
    page = report(fair_run, failed_run, colour_run, "--out", tmp_path / "all.html")
    assert str(fair_run) in page.headings, "two folders are called run, so all go by their paths"
    assert "What differs" in page.headings
    assert "consistency.learning_rate" in page.text
    assert set(ALL) <= set(page.headings)


def test_twice_the_same_pictures(fair_run: Path, tmp_path: Path) -> None:
    first, second = (report(fair_run, "--out", tmp_path / f"{name}.html") for name in "ab")
    pictures = [[a["src"] for tag, a in page.elements if tag == "img"] for page in (first, second)]
    assert pictures[0] == pictures[1]


def test_no_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "holds no recipe.toml" in str(result.exception)
