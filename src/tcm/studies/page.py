"""The page of a study, in the design of `tcm report`."""

import shlex
from html import escape
from pathlib import Path

import torch

from tcm.evaluation.generation import quantise
from tcm.foundation.counting import duration, plural
from tcm.foundation.devices import best_device
from tcm.foundation.errors import TcmError
from tcm.report.drawing import COLUMNS, spread_conditions
from tcm.report.html import (
    Content,
    Html,
    code,
    details,
    figure,
    html,
    paragraph,
    rows_of_images,
    section,
    side_by_side,
    table,
)
from tcm.report.page import whole_page, write_page
from tcm.studies import figures
from tcm.studies.common_stages import with_needed
from tcm.studies.courses import denoising, gradients, over_training
from tcm.studies.folders import STUDY_FILE
from tcm.studies.markdown import render_markdown
from tcm.studies.measuring import Subject, load_subject, sampling_steps
from tcm.studies.resolve import resolve_study, shipped_studies, study_to_toml
from tcm.studies.results import StudyResults, Trial
from tcm.studies.words import (
    Table,
    by_kind,
    conditions,
    failures,
    left_out,
    paper_table,
    seeds_text,
    tables,
    verdict_parts,
    verdict_sentence,
)

BOXES = {"held": "held", "contradicted": "failure"}
"""The look of a verdict; the others look like something in progress."""


def write_study_report(results: StudyResults, out: Path) -> None:
    """Write the page and, next to it, the Markdown, each whole or not at all.

    >>> write_study_report(read_study(Path("runs/t-prime")), Path("runs/t-prime/report.html"))  # doctest: +SKIP
    """
    if out.suffix != ".html":
        raise TcmError(f"--out={out} does not end in .html; the Markdown is written next to it, as .md")
    for path, text in ((out, render(results)), (out.with_suffix(".md"), render_markdown(results))):
        write_page(path, text)


def render(results: StudyResults) -> str:
    """The whole page."""
    parts = [
        _top(results),
        _tables(results),
        _every_seed(results),
        over_training(results),
        denoising(results),
        gradients(results),
        _beside_the_paper(results),
        _samples(results),
        _record(results),
    ]
    return whole_page(results.study.title, parts)


def _top(results: StudyResults) -> str:
    study, verdict = results.study, results.verdict
    kind = "progress" if verdict is None else BOXES.get(verdict.outcome, "progress")
    parts = [
        paragraph("Truncated consistency models · study", "over"),
        f"<h1>{escape(study.title)}</h1>",
        paragraph(study.question, "facts"),
        paragraph(f"The claim ({study.where}): {study.claim}", "facts"),
        paragraph(Html("<br>".join(map(escape, [verdict_sentence(results), *verdict_parts(results)]))), kind),
    ]
    count, done = len(results.trials), sum(trial.status == "measured" for trial in results.trials)
    failed = [trial for trial in results.trials if trial.status == "failed"]
    if done + len(failed) < count:
        waiting = (
            f"{done} of {plural(count, 'run')} (variants × seeds) measured so far. To resume: {html(_command(results))}"
        )
        parts.append(paragraph(Html(waiting), "progress"))
    if failed:
        lines = "".join(f"<br>{escape(line)}" for line in failures(results))
        parts.append(
            paragraph(Html(f"<strong>{len(failed)} of {plural(count, 'run')} failed</strong>{lines}"), "failure")
        )
    return f"<header>{''.join(parts)}</header>"


def _tables(results: StudyResults) -> str:
    sentence = (
        f"Each variant against {results.study.compared_with}: the paired difference, its 95 % interval, and how many "
        "seeds agree with its sign. Bold where the interval excludes 0."
    )
    parts = [_html_table(table) for table in tables(results)]
    problems = [paragraph(line, "note") for line in left_out(results)]
    return section("Results", sentence, *parts, paragraph(conditions(results), "note"), *problems)


def _html_table(content: Table) -> str:
    heads, rows = content
    marked = [
        [Html(f"<strong>{escape(cell.text)}</strong>") if cell.strong else cell.text for cell in row] for row in rows
    ]
    return table(heads, marked, "study")


def _every_seed(results: StudyResults) -> str:
    quantities = [quantity for same_kind in by_kind(results) for quantity in same_kind if quantity.t is None]
    parts = []
    for quantity in quantities:
        values = {variant: results.values(variant, quantity) for variant in results.study.variants}
        if any(values.values()):
            svg = figures.every_seed(values, results.study.compared_with, results.title(quantity))
            parts.append(figure(svg, f"{results.title(quantity)} of every seed and variant"))
    sentence = (
        "A dot for each seed, a tick at their mean, and a bar for the mean's 95 % interval. The dashed line is the "
        f"mean of {results.study.compared_with}. Paired differences can be certain where bars overlap."
    )
    return section("Every seed", sentence, side_by_side(parts)) if parts else ""


def _beside_the_paper(results: StudyResults) -> str:
    paper = results.study.paper
    if paper is None:
        return ""
    note = (paper.note or results.study.where).removesuffix(".")
    sentence = (
        f"The paper's own figures ({note}) and what was measured here. Data, network and "
        "detector differ, so compare the order of the rows, not the values."
    )
    return section("Beside the paper", sentence, _html_table(paper_table(results)))


def _samples(results: StudyResults) -> str:
    rows: list[tuple[Content, torch.Tensor]] = []
    notes = []
    for variant in results.study.variants:
        trial = next((trial for trial in results.of(variant) if trial.stage and trial.stage.model.is_dir()), None)
        if trial is None:
            continue
        try:
            rows.append(_row(results, trial))
        except TcmError as error:
            notes.append(paragraph(f"{_named(trial)} gives no images: {error}", "note"))
    sentence = "The same noise and condition in each column, through each variant's model of its first finished seed."
    if not rows:
        return section("Samples", "No model gives images.", *notes) if notes else ""
    drawn = figure(rows_of_images(rows), "Samples of the same noises from each variant, one row per variant")
    return section("Samples", sentence, drawn, *notes)


def _row(results: StudyResults, trial: Trial) -> tuple[Content, torch.Tensor]:
    assert trial.record is not None, "its caller asked"
    subject = Subject(trial.variant.stage, None, COLUMNS)
    folders = {stage.name: stage.folder for stage in trial.record.stages}
    model = load_subject(trial.variant.recipe, folders, subject).to(best_device())
    steps = next(iter(sampling_steps(results.study, model.sampler)), 1)
    images = model.sample(steps=steps, seeds=range(COLUMNS), condition=spread_conditions(model, COLUMNS))
    label = f"{html(trial.variant.name)}<small>{model.sampler.name(steps)}, seed {trial.variant.seed}</small>"
    return Html(label), quantise(images)


def _record(results: StudyResults) -> str:
    """What was trained, for how long, on what, and by which command."""
    study = results.study
    rows: list[list[Content]] = []
    for variant, spec in study.variants.items():
        trials = [trial for trial in results.of(variant) if trial.record is not None]
        rows.append([variant, *_changes(spec.overrides), seeds_text(results, variant), *_budget(trials)])
    starts = [
        start
        for trial in results.trials
        if trial.record is not None
        for stage in trial.record.stages
        for start in stage.starts
    ]
    machines = dict.fromkeys(f"{start.machine}; {start.versions}" for start in starts)
    parts = [
        table(["variant", "changes to the recipe", "seeds", "stages (steps)", "wall time per seed"], rows, "long"),
        *(paragraph(f"Trained on {machine}.", "note") for machine in machines),
        paragraph(Html(f"Command: {html(_command(results))}"), "note"),
        details("The study", f"<pre>{escape(study_to_toml(study))}</pre>"),
    ]
    sentence = (
        f"All variants start from the recipe {study.base}. Wall time is the time of all stages that lead to a model, "
        "averaged over seeds; a stage that variants share was trained once."
    )
    return section("How it was made", sentence, *parts)


def _command(results: StudyResults) -> Html:
    """What runs the study, or resumes it."""
    name = results.study.name
    known = name in shipped_studies() and resolve_study(name) == results.study
    source = name if known else str(results.folder / STUDY_FILE)
    return code(shlex.join(["tcm", "study", "run", source, "--out", str(results.folder)]))


def _changes(overrides: tuple[str, ...]) -> list[Content]:
    return [Html("<br>".join(html(code(override)) for override in overrides)) if overrides else "none"]


def _budget(trials: list[Trial]) -> list[Content]:
    """The stages behind a variant's model with their steps, and the mean time that they took."""
    stages, seconds = "–", []
    for trial in trials:
        assert trial.record is not None, "its caller asked"
        needed = with_needed(trial.variant.recipe, {trial.variant.stage})
        used = [stage for stage in trial.record.stages if stage.numbers and stage.name in needed]
        stages = ", ".join(f"{stage.name} ({stage.step:,})" for stage in used) or stages
        seconds += [sum(stage.seconds for stage in used)] if used else []
    return [stages, duration(sum(seconds) / len(seconds)) if seconds else "–"]


def _named(trial: Trial) -> str:
    return f"{trial.variant.name}, seed {trial.variant.seed}"
