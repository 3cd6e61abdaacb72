"""`tcm study report` for finished and unfinished studies: the page and the Markdown."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from browsing import CHROMIUM, look_at
from pages import Page, check
from playwright.sync_api import Browser

from tcm.cli.study_report import study_report
from tcm.evaluation.scores import append_scores, read_scores
from tcm.foundation.errors import TcmError
from tcm.recipes.folders import stage_folders
from tcm.recipes.resolve import resolve
from tcm.studies.analysis import summarise
from tcm.studies.folders import MEASURED_FILE
from tcm.studies.results import read_study
from tcm.studies.schema import GRADIENTS, Quantity
from tcm.studies.words import main_table, summary_text, verdict_parts, verdict_sentence

ONE_STEP = Quantity("fid", steps=1)
SECTIONS = [
    "Results",
    "Every seed",
    "Over training",
    "Denoising",
    "Gradient norms",
    "Beside the paper",
    "Samples",
    "How it was made",
]


@pytest.fixture
def copied(study_folder: Path, tmp_path: Path) -> Path:
    """A study's folder to change."""
    return Path(shutil.copytree(study_folder, tmp_path / "out"))


def test_a_finished_study(study_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    study_report(study_folder, target)
    said = capsys.readouterr().out
    page = check(Page(target))
    assert page.headings == SECTIONS
    assert "Where to truncate &lt;small&gt;" in page.source, "text is escaped"
    results = read_study(study_folder)
    assert verdict_sentence(results) in said
    assert verdict_sentence(results).replace("'", "&#x27;") in page.text
    values = results.values("t' = 1", ONE_STEP)
    scores = {
        seed: read_scores(study_folder / "runs" / f"seed-{seed}" / "t-1" / "scores.jsonl")[0].value for seed in (0, 1)
    }
    assert values == scores
    assert summary_text(summarise(list(scores.values()))) in page.text
    assert "2.46" in page.text, "the paper's figure"
    assert str(tmp_path) not in page.text.replace(str(study_folder), "")
    markdown = target.with_suffix(".md").read_text()
    assert f"**{verdict_sentence(results)}**" in markdown
    for row in main_table(results, [ONE_STEP])[1]:
        assert f"| {row[0].text} | {row[1].text} | {row[2].text} |" in markdown


def test_what_each_score_is_of(study_folder: Path) -> None:
    """The model's scores and those of its kept checkpoints, by what the study measures."""
    results = read_study(study_folder)
    assert results.study.decisive == [ONE_STEP]
    sampled, denoised = [ONE_STEP, Quantity("fid", steps=2)], [Quantity("dfid", t=0.2), Quantity("dfid", t=5.0)]
    assert results.quantities == [*sampled, *denoised, GRADIENTS]
    trial = results.of("t' = 4")[0]
    assert {quantity: score.t for quantity, score in trial.scores.items()} == {
        quantity: quantity.t for quantity in (*sampled, *denoised)
    }
    assert list(trial.values) == results.quantities
    course = trial.courses["truncated"]
    assert list(course) == [0, 2, 4]
    assert all(list(scores) == [*sampled, *denoised] for scores in course.values())
    assert [results.title(quantity) for quantity in (ONE_STEP, denoised[0], GRADIENTS)] == [
        "digits distance, 1 step",
        "denoised digits distance, t = 0.2",
        "gradient spikes per 1,000 steps",
    ]
    assert results.metric(denoised[0]) == "denoised digits distance"
    assert results.title(Quantity("kid", steps=3)) == "kid, 3 steps", "before there are scores"


def test_scores_of_other_models_are_not_the_study_s(copied: Path) -> None:
    """`tcm eval --dfid` may have written them into the same file, of a model whose name has an @."""
    before = read_study(copied).of("t' = 4")[0]
    file = copied / "runs" / "seed-0" / "t-4" / "scores.jsonl"
    denoised = next(score for score in read_scores(file) if score.t is not None and score.step is None)
    append_scores(file, [replace(denoised, subject=name, value=-1.0) for name in ("other/model", "me@home/model")])
    after = read_study(copied).of("t' = 4")[0]
    assert (after.scores, after.courses) == (before.scores, before.courses)


def test_a_failed_variant_is_shown(study_folder: Path, tmp_path: Path) -> None:
    study_report(study_folder, tmp_path / "page.html")
    for text in (Page(tmp_path / "page.html").text, (tmp_path / "page.md").read_text()):
        assert "too fast, seed 0: truncated: training does not recover" in text
        assert "0 of 2, 2 failed" in text


def test_an_unfinished_study(copied: Path) -> None:
    """Missing seeds are counted, pairs that are not there are not compared, and the page says how to resume."""
    shutil.rmtree(copied / "runs" / "seed-1" / "t-1")
    (copied / "runs" / "seed-0" / "t-4" / MEASURED_FILE).unlink()
    study_report(copied)
    page = check(Page(copied / "report.html"))
    assert "4 of 8 runs (variants × seeds) measured so far" in page.text
    assert f"tcm study run {copied / 'study.toml'} --out {copied}" in page.text
    assert "a single seed, so there is no interval" in page.text
    results = read_study(copied)
    assert [trial.status for trial in results.of("t' = 1")] == ["measured", "not begun"]
    assert [row[1].text for row in main_table(results, [ONE_STEP])[1]] == [
        "1 of 2",
        "1 of 2",
        "2",
        "0 of 2, 2 failed",
    ]


def test_a_study_that_has_not_begun(copied: Path) -> None:
    shutil.rmtree(copied / "runs")
    study_report(copied)
    page = check(Page(copied / "report.html"))
    assert "The claim cannot be judged yet" in page.text
    assert page.headings == ["Results", "Beside the paper", "How it was made"]


def test_scores_that_cannot_be_read_are_named(copied: Path) -> None:
    (copied / "runs" / "seed-0" / "t-1" / "scores.jsonl").write_text("{}\n")
    study_report(copied)
    text = Page(copied / "report.html").text
    assert "The scores of t&#x27; = 1, seed 0, are left out" in text


@pytest.mark.parametrize("damage", ["no scores", "a score less", "no model"])
def test_what_is_gone_is_not_counted(copied: Path, damage: str) -> None:
    """A variant whose scores or model were lost is measured again by the next run, and until then it is not hidden."""
    run = copied / "runs" / "seed-0" / "t-1"
    scores = run / "scores.jsonl"
    if damage == "no scores":
        scores.unlink()
    elif damage == "a score less":
        scores.write_text("".join(scores.read_text().splitlines(keepends=True)[:-1]))
    else:
        shutil.rmtree(stage_folders(resolve(str(run / "recipe.toml")), run)["truncated"] / "model")
    study_report(copied)
    results = read_study(copied)
    assert [trial.status for trial in results.of("t' = 1")] == ["unfinished", "measured"]
    assert main_table(results, [ONE_STEP])[1][1][1].text == "1 of 2"
    if damage == "no model":
        for text in (Page(copied / "report.html").text, (copied / "report.md").read_text()):
            assert "its model is not there any more; `tcm study run` trains it again" in text


def test_a_page_goes_where_a_page_can_be(study_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(TcmError, match=r"folder\.html is a folder; name a file"):
        study_report(study_folder, tmp_path / "folder.html")
    with pytest.raises(TcmError, match=r"page\.md does not end in \.html"):
        study_report(study_folder, tmp_path / "page.md")
    (tmp_path / "file").touch()
    with pytest.raises(TcmError, match="cannot be written"):
        study_report(study_folder, tmp_path / "file" / "page.html")


def test_of_a_traceback_the_last_line_is_shown(copied: Path) -> None:
    failed = copied / "runs" / "seed-0" / "too-fast" / "failed.json"
    failed.write_text(json.dumps({"stage": "truncated", "error": "x: Traceback\n  File\nMemoryError: no memory\n"}))
    study_report(copied)
    assert "- too fast, seed 0: MemoryError: no memory\n" in (copied / "report.md").read_text()


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match=r"has no study\.toml"):
        study_report(tmp_path)


def test_what_the_verdict_says(study_folder: Path) -> None:
    """The sentence follows the values: the other way round it says worse, with the interval's ends exchanged."""
    results = read_study(study_folder)
    (expects,) = results.study.expects
    turned = expects.model_copy(update={"better": "t' = 4", "than": ("t' = 1",)})
    other = replace(results, study=results.study.model_copy(update={"expects": (turned,)}))
    first, second = verdict_sentence(results), verdict_sentence(other)
    assert results.verdict is not None
    assert other.verdict is not None
    assert {results.verdict.outcome, other.verdict.outcome} <= {"leaned that way", "not seen"}
    for word, opposite in (("better", "worse"), ("worse", "better")):
        if f"is {word} than" in first:
            assert f"is {opposite} than" in second
    assert first.rpartition(" by ")[2] == second.rpartition(" by ")[2]
    allowing = expects.model_copy(update={"margin": -0.1})
    with_margin = replace(results, study=results.study.model_copy(update={"expects": (allowing,)}))
    (comparison,) = with_margin.comparisons(allowing)
    assert comparison.beyond is not None
    assert comparison.beyond.interval is not None
    low, high = comparison.beyond.interval
    said = re.search(r"better than the margin by (\S+) to (\S+)\)", verdict_sentence(with_margin).replace("−", "-"))
    assert said is not None
    assert [float(end) for end in said.groups()] == pytest.approx([low, high], abs=(high - low) / 10)
    none = replace(results, study=results.study.model_copy(update={"expects": ()}))
    assert verdict_sentence(none).startswith("This study checks no single claim")


def test_a_variant_that_diverges_is_worse(study_folder: Path) -> None:
    results = read_study(study_folder)
    (expects,) = results.study.expects
    against = expects.model_copy(update={"than": ("too fast",)})
    results = replace(results, study=results.study.model_copy(update={"expects": (against,)}))
    assert verdict_sentence(results) == (
        "The claim held here: by digits distance, 1 step, too fast diverged with 2 seeds."
    )


def test_each_part_of_a_claim_has_its_outcome(study_folder: Path) -> None:
    results = read_study(study_folder)
    (expects,) = results.study.expects
    both = expects.model_copy(update={"than": ("t' = 4", "too fast")})
    results = replace(results, study=results.study.model_copy(update={"expects": (both,)}))
    assert verdict_sentence(results).endswith(": 1 of 2 comparisons hold.")
    first, second = verdict_parts(results)
    assert first.startswith(("Leaning towards it: by", "Not confirmed: by"))
    assert second == "Held: by digits distance, 1 step, too fast diverged with 2 seeds."


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium")
def test_in_a_browser(browser: Browser, study_folder: Path, tmp_path: Path) -> None:
    study_report(study_folder, tmp_path / "page.html")
    for width in (1280, 400):
        for scheme in ("light", "dark"):
            look_at(browser, tmp_path / "page.html", scheme, width, pictures=3)
