"""The headline: each way of sampling each model, with its distance where that has been measured."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tcm.evaluation.scores import ConditionSource, Score, differing_conditions
from tcm.recipes.folders import SCORES_FILE
from tcm.report.drawing import Drawn, ObservedRun, StageDrawings
from tcm.report.records import RunRecord, StageRecord

SHOWN_CONDITIONS: tuple[ConditionSource, ...] = ("drawn", "given")
"""A line shows a model under all its conditions, so not under one that a user chose."""
DENOISING_TIMES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 80.0)


@dataclass(frozen=True)
class Row:
    """A line of the headline table; `command` measures what `score` lacks.

    `incomparable`: it has been measured, but not under the conditions of the other lines.
    """

    run: RunRecord
    stage: StageRecord
    drawn: Drawn
    evaluations: int
    parameters: int
    score: Score | None
    incomparable: bool
    command: str


@dataclass(frozen=True)
class DenoisingByTime:
    """dFID_t of one stage: `values` at `times`."""

    stage: StageRecord
    times: list[float]
    values: list[float]


def headline_rows(runs: Sequence[ObservedRun]) -> list[Row]:
    """The lines of all runs; all their scores were taken under the same conditions."""
    pairs = [(run, stage, drawn) for run in runs for stage in run.drawings for drawn in stage.drawn]
    scores = [[score for score in run.record.scores if _is_line(score, stage, drawn)] for run, stage, drawn in pairs]
    chosen = largest_group([score for some in scores for score in some])
    return [
        Row(
            run.record,
            stage.stage,
            drawn,
            drawn.evaluations,
            stage.parameters,
            next((score for score in reversed(some) if score in chosen), None),
            bool(some) and not any(score in chosen for score in some),
            measure_command(run.record, stage.stage, drawn, chosen),
        )
        for (run, stage, drawn), some in zip(pairs, scores, strict=True)
    ]


def best_value(rows: Sequence[Row]) -> float | None:
    """The lowest distance that one or two evaluations reach."""
    return min((row.score.value for row in rows if row.score and row.evaluations <= 2), default=None)


def value_text(row: Row) -> str:
    """A line's score as text; what has not been measured, or not like the others, says so."""
    score = row.score
    if score is None:
        return "not comparable" if row.incomparable else "not measured"
    digits = 2 if abs(score.value) < 100 else 0
    return f"{score.value:,.{digits}f}" + ("" if score.deviation is None else f" ± {score.deviation:.2g}")


def speed_text(images_per_second: float) -> str:
    """Images per second as text.

    >>> speed_text(1234.5), speed_text(0.123)
    ('1,234', '0.12')
    """
    return f"{images_per_second:,.0f}" if images_per_second >= 10 else f"{images_per_second:.2g}"


def denoising_curves(run: ObservedRun) -> list[DenoisingByTime]:
    """dFID_t of each consistency model for which it has been measured, under the same conditions."""
    found: list[tuple[StageRecord, float, Score]] = []
    for stage in run.drawings:
        for score in run.record.scores:
            if score.t is not None and stage.stage.sampler.generates_at_once and score.subject_hash == stage.hash:
                # The points of a curve differ in t and in nothing else.
                found.append((stage.stage, score.t, replace(score, t=None)))
    chosen = largest_group([score for _, _, score in found])
    curves = []
    for stage in run.drawings:
        points = {t: score.value for owner, t, score in found if owner == stage.stage and score in chosen}
        if points:
            times = sorted(points)
            curves.append(DenoisingByTime(stage.stage, times, [points[t] for t in times]))
    return curves


def denoising_metric(run: ObservedRun) -> str:
    """The name of the measured dFID_t, such as `denoised digits distance`."""
    names = [score.metric for score in run.record.scores if score.t is not None]
    return names[-1] if names else "dFID"


def largest_group(scores: Sequence[Score]) -> list[Score]:
    """The most scores that may be compared with each other; of equally many, the newest.

    Their conditions were all drawn or all given; a model without conditions may be compared with both.
    """
    groups: list[list[Score]] = []
    for source in SHOWN_CONDITIONS:
        alike: list[list[Score]] = []
        for score in (score for score in scores if score.conditions in (None, source)):
            group = next((group for group in alike if not differing_conditions(group[0], score)), None)
            if group is None:
                alike.append([score])
            else:
                group.append(score)
        groups += alike
    return max(groups, key=lambda group: (len({_what(score) for score in group}), group[-1].time), default=[])


def measure_command(run: RunRecord, stage: StageRecord, drawn: Drawn | None, others: Sequence[Score] = ()) -> str:
    """The command that measures one line like the `others`, or without `drawn` the denoising of a stage."""
    count = others[0].count if others else None
    digits = run.recipe.data.path == "digits"
    words = ["tcm", "eval", str(stage.model), "--data", run.recipe.data.path]
    words += ["--detector", "digits"] if digits else []
    words += ["-n", str(count or 5000)] if count or digits else []
    words += ["--steps", str(drawn.steps)] if drawn else []
    given = run.recipe.conditional and any(score.conditions == "given" for score in others)
    words += ["--data-conditions"] if given else []
    if drawn is None:
        _, high = stage.spec.domain(run.recipe)
        times = [t for t in DENOISING_TIMES if t < high] + [high]
        words += ["--dfid", ",".join(f"{t:g}" for t in times)]
    return shlex.join([*words, "--scores", str(run.folder / SCORES_FILE)])


def _is_line(score: Score, stage: StageDrawings, drawn: Drawn) -> bool:
    """Whether it is the distance of this model, sampled in this way."""
    same = (score.kind, score.t, score.subject_hash, score.sampling) == ("fid", None, stage.hash, drawn.described)
    return same and score.conditions != "chosen"


def _what(score: Score) -> tuple[str, str, str | None]:
    return score.metric, score.subject_hash, score.sampling
