"""The report's first part: what the runs are, how far they have come, and their headline table."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from tcm.evaluation.scores import Score
from tcm.foundation.counting import duration
from tcm.foundation.locks import is_held
from tcm.recipes.resolve import differences
from tcm.report.drawing import ObservedRun
from tcm.report.figures import series_of
from tcm.report.headline import Row, best_value, headline_rows, speed_text, value_text
from tcm.report.html import (
    Content,
    Html,
    code,
    data_uri,
    details,
    figure,
    html,
    paragraph,
    rows_of_images,
    section,
    table,
)
from tcm.report.records import RunRecord, StageRecord, Status
from tcm.training.checkpoint import newest_step
from tcm.training.locking import LOCK_FILE
from tcm.training.metrics import METRICS_FILE

HERO, HERO_ROWS = 20, 2
NFE = Html('<abbr title="network evaluations per image">NFE</abbr>')


def top(runs: Sequence[ObservedRun]) -> str:
    """Title; of each run what it is, a band of samples, its stages, and what has gone wrong."""
    title = " and ".join(run.record.name for run in runs)
    parts = [paragraph("Truncated consistency models", "over"), f"<h1>{escape(title)}</h1>"]
    if len(runs) == 1:
        parts.append(_introduction(runs[0]))
    else:
        parts += [f'<div class="run"><h2>{escape(run.record.name)}</h2>{_introduction(run)}</div>' for run in runs]
    return f"<header>{''.join(parts)}</header>"


def _introduction(run: ObservedRun) -> str:
    parts = [paragraph(_facts(run.record), "facts")]
    if run.showpiece is not None:
        label = f"{HERO * HERO_ROWS} samples of {run.record.name}, {run.showpiece.stage.name}, {run.showpiece.way}"
        rows = [("", run.showpiece.samples[HERO * row :][:HERO]) for row in range(HERO_ROWS)]
        parts.append(f'<div class="hero">{figure(rows_of_images(rows), label)}</div>')
    parts.append(_stage_list(run.record))
    parts += [_failure(stage) for stage in run.record.stages if stage.status == "failed"]
    parts += [_warnings(stage) for stage in run.record.stages if stage.warnings]
    parts += [_unfinished(run.record, stage) for stage in run.record.stages if stage.status == "unfinished"]
    return "".join(parts)


def headline(runs: Sequence[ObservedRun]) -> str:
    """The table of all models and ways of sampling."""
    rows = headline_rows(runs)
    problems = [
        paragraph(
            f"The model of {drawing.stage.name} in {run.record.name} gives no "
            f"{'more ' if drawing.drawn else ''}images: {drawing.problem}",
            "note",
        )
        for run in runs
        for drawing in run.drawings
        if drawing.problem
    ]
    problems += [
        paragraph(f"The scores of {run.record.name} are left out: {run.record.scores_problem}", "note")
        for run in runs
        if run.record.scores_problem
    ]
    if not rows:
        nothing = "No stage has finished, so there is no model to measure yet."
        sentence = "No model of these runs gives images." if problems else nothing
        return section("Results", sentence, *problems)
    scores = [row.score for row in rows if row.score is not None]
    metric = scores[0].metric if scores else "distance"
    best = best_value(rows)
    heads: list[Content] = ["stage", "sampling", NFE, f"{metric} ↓", "images/s", "parameters"]
    lines: list[list[Content]] = []
    for run in runs:
        colours = series_of(run.record.stages)
        for row in (row for row in rows if row.run == run.record):
            line: list[Content] = [
                _dotted(row.stage.name, colours[row.stage.name]),
                row.drawn.way,
                f"{row.evaluations}",
                _value(row, best),
                speed_text(row.drawn.images_per_second),
                f"{row.parameters:,}",
            ]
            lines.append([run.record.name, *line] if len(runs) > 1 else line)
    return section(
        "Results",
        _verdict(rows),
        table(["run", *heads] if len(runs) > 1 else heads, lines, "headline"),
        *_conditions(scores),
        *_unmeasured(rows),
        *problems,
    )


def recipe_differences(runs: Sequence[ObservedRun]) -> str:
    """How the runs differ from the first."""
    if len(runs) < 2:
        return ""
    first = runs[0].record
    parts = []
    for other in (run.record for run in runs[1:]):
        found = [change.partition(": ") for change in differences(first.recipe, other.recipe)]
        rows: list[list[Content]] = [[code(key), *change.split(" → ", 1)] for key, _, change in found if key != "name"]
        if rows:
            parts.append(table(["key", first.name, other.name], rows, "long"))
        else:
            parts.append(paragraph(f"{first.name} and {other.name} have the same recipe."))
    return section("What differs", "The recipe keys that differ; everything else is identical.", *parts)


def newest_grids(run: RunRecord, statuses: Sequence[Status]) -> list[str]:
    """The newest samples that training drew, of each stage of these statuses."""
    parts = []
    for stage in run.stages:
        grid = stage.latest_samples
        if stage.status in statuses and grid is not None:
            step = int(grid.stem.removeprefix("step-"))
            source = data_uri(grid.read_bytes())
            label = f"Samples of {stage.name} at step {step:,}"
            picture = f'<img class="grid" alt="" src="{source}">'
            parts.append(figure(picture, label, f"{run.name}, {stage.name}, step {step:,}"))
    return parts


def in_progress(runs: Sequence[ObservedRun]) -> str:
    """The newest samples of stages that have not finished."""
    parts = [part for run in runs for part in newest_grids(run.record, ("unfinished", "failed"))]
    if not parts:
        return ""
    sentence = (
        "The newest samples of the stages that have not finished, as training drew them: while a stage runs, they "
        "should sharpen from report to report."
    )
    return section("So far", sentence, f'<div class="side-by-side">{"".join(parts)}</div>')


def _facts(run: RunRecord) -> str:
    recipe = run.recipe
    shape = ""
    if recipe.image_shape is not None:
        channels, height, width = recipe.image_shape
        shape = f", {height} × {width} {'grey' if channels == 1 else 'colour'}"
    condition = "conditional" if recipe.conditional else "unconditional"
    return f"Recipe {recipe.name} on {recipe.data.path}{shape}, {condition}, seed {recipe.seed}."


def _stage_list(run: RunRecord) -> str:
    colours = series_of(run.stages)
    items = []
    for stage in run.stages:
        most = "at most " if stage.spec.until_flat else ""
        progress = f"{most}{stage.spec.steps:,} steps"
        if stage.status == "finished":
            progress = f"{stage.spec.steps:,} steps"
        if stage.status in ("unfinished", "failed"):
            progress = f"step {stage.step:,} of {most}{stage.spec.steps:,}"
        taken = f" in {duration(stage.seconds)}" if stage.numbers else ""
        waiting = "waiting" if stage.status == "not begun" else ""
        kind = "failed" if stage.warnings else stage.status
        status = f"{stage.status}, with warnings" if stage.warnings else stage.status
        items.append(
            f'<li class="{waiting}" style="--series:var(--series-{colours[stage.name]})">'
            f"<strong>{escape(stage.name)}</strong>{escape(stage.spec.describe())}<br>{progress}{taken}<br>"
            f'<span class="{kind}">{status}</span></li>'
        )
    return f'<ol class="stages">{"".join(items)}</ol>'


def _failure(stage: StageRecord) -> str:
    reason = stage.lines[-1].get("reason", "")
    return paragraph(
        Html(
            f"<strong>{escape(stage.name)} failed at step {stage.step:,}</strong>: {escape(str(reason))}. "
            f"Lower {html(code(f'{stage.name}.learning_rate'))} = {stage.spec.learning_rate:g}, set or "
            f"lower {html(code(f'{stage.name}.clip'))}, or use a higher precision; then train into a new folder."
        ),
        "failure",
    )


def _warnings(stage: StageRecord) -> str:
    said = "".join(f"<br>{escape(reason)}." for reason in stage.warnings)
    return paragraph(
        Html(f"<strong>{escape(stage.name)} may not have learned what it should</strong>{said}"), "failure"
    )


def _unfinished(run: RunRecord, stage: StageRecord) -> str:
    metrics = stage.folder / METRICS_FILE
    written = ""
    if metrics.is_file():
        when = datetime.fromtimestamp(metrics.stat().st_mtime, UTC).isoformat(" ", "seconds")
        written = f" (its last numbers were written at {when})"
    training = is_held(stage.folder.parent / LOCK_FILE)
    known = "If no process is training it" if training is None else "No process is training it"
    resume = (
        f"{known}: {html(code(shlex.join(['tcm', 'train', str(run.folder)])))} resumes it from its newest checkpoint, "
        f"step {newest_step(stage.folder):,}."
    )
    now = "A process is training it." if training else resume
    return paragraph(Html(f"<strong>{escape(stage.name)} has not finished</strong>{written}. {now}"), "progress")


def _dotted(name: str, series: int) -> Html:
    return Html(f'<span class="dot" style="--series:var(--series-{series})"></span>{escape(name)}')


def _value(row: Row, best: float | None) -> str | Html:
    if row.score is None:
        return Html(f'<span class="unmeasured">{value_text(row)}</span>')
    return Html(f'<span class="best">{value_text(row)}</span>') if row.score.value == best else value_text(row)


def _verdict(rows: Sequence[Row]) -> Html | str:
    """One sentence with the numbers that matter, as far as they are known."""
    one_step = [row for row in rows if row.evaluations == 1 and row.score is not None]
    if len({row.run.folder for row in rows}) > 1 or not one_step:
        return "The distance to the data (lower is better) and its cost: how often the network is evaluated per image."
    first, *others = [f"{escape(row.stage.name)} {value_text(row)}" for row in sorted(one_step, key=_score_value)]
    heun = [
        f"{escape(row.stage.name)} {value_text(row)} with {row.evaluations}"
        for row in rows
        if row.evaluations > 2 and row.score
    ]
    others_text = "".join(f", {other}" for other in others) + "".join(f"; {one}" for one in heun)
    return Html(
        f"The distance to the data with one evaluation: <strong>{first}</strong>{others_text}. Lower is better."
    )


def _score_value(row: Row) -> float:
    return float("inf") if row.score is None else row.score.value


def _conditions(scores: Sequence[Score]) -> list[str]:
    speed = "Images/s were measured while this report was made, in batches of 64 where the model is small enough."
    if not scores:
        return [paragraph(speed, "note")]
    one = scores[0]
    reference = "" if one.reference_count is None else f" ({one.reference_count:,} images)"
    given = " under given conditions" if any(score.conditions == "given" for score in scores) else ""
    return [
        paragraph(
            f"{one.metric}: {one.count:,} samples{given} against {one.reference}{reference}, detector {one.detector} "
            f"{one.detector_hash[:8]}, {one.preprocessing}; one measurement each, so a small difference may be chance. "
            f"{speed}",
            "note",
        )
    ]


def _unmeasured(rows: Sequence[Row]) -> list[str]:
    missing = [row.command for row in rows if row.score is None]
    if not missing:
        return []
    items = "".join(f"<li>{html(code(command))}</li>" for command in missing)
    return [details("Commands that measure what is missing", f'<ul class="commands">{items}</ul>')]
