"""A study's results in words and numbers: the verdict, and the tables that the page and the Markdown share."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

from tcm.foundation.counting import plural
from tcm.foundation.errors import last_line
from tcm.studies.analysis import Comparison, Difference, Outcome, Summary, difference, summarise
from tcm.studies.results import StudyResults
from tcm.studies.schema import Expects, Quantity


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `strong` where a difference is certain."""

    text: str
    strong: bool = False


Table = tuple[list[str], list[list[Cell]]]
"""The heads of the columns, and the rows."""

MOST_COMPARED = 3
"""Quantities of which a table shows differences too."""

OUTCOMES: dict[Outcome, str] = {
    "held": "The claim held here",
    "leaned that way": "The results lean towards the claim but are not certain",
    "not seen": "The claim was not confirmed here",
    "contradicted": "The results contradict the claim here",
    "not measured": "The claim cannot be judged yet",
}


SHORT: dict[Outcome, str] = {
    "held": "Held",
    "leaned that way": "Leaning towards it",
    "not seen": "Not confirmed",
    "contradicted": "Contradicted",
    "not measured": "Not measured yet",
}


def verdict_sentence(results: StudyResults) -> str:
    """Whether the claim held, with the difference that decides it; of several, how many do."""
    verdict = results.verdict
    if verdict is None:
        return "This study checks no single claim; its tables and curves are the result."
    said, count = OUTCOMES[verdict.outcome], len(verdict.comparisons)
    if count == 1:
        (part,) = _parts(results)
        return f"{said}: {part[1]}."
    held = sum(comparison.outcome == "held" for comparison in verdict.comparisons)
    return f"{said}: {held} of {count} comparisons hold."


def verdict_parts(results: StudyResults) -> list[str]:
    """Where several comparisons decide, each of them and its outcome, a sentence each."""
    parts = _parts(results)
    return [f"{SHORT[outcome]}: {text}." for outcome, text in parts] if len(parts) > 1 else []


def _parts(results: StudyResults) -> list[tuple[Outcome, str]]:
    return [
        (
            comparison.outcome,
            f"by {results.title(results.study.quantity(expected.by))}, {_comparison(expected, comparison)}",
        )
        for expected in results.study.expects
        for comparison in results.comparisons(expected)
    ]


def _comparison(expected: Expects, comparison: Comparison) -> str:
    better, other, gain = expected.better, comparison.other, comparison.gain
    diverged = [(better, comparison.diverged), (other, comparison.other_diverged)]
    runaway = [f"{name} diverged with {plural(count, 'seed')}" for name, count in diverged if count]
    if gain is None:
        return " and ".join(runaway) or f"{better} and {other} have no seed in common that is measured"
    return ", and ".join([_difference_sentence(expected, comparison, gain), *runaway])


def _difference_sentence(expected: Expects, comparison: Comparison, gain: Difference) -> str:
    if gain.mean == 0:
        return f"{expected.better} and {comparison.other} are equal"
    sign = 1 if gain.mean >= 0 else -1
    interval = None if gain.interval is None else sorted(sign * end for end in gain.interval)
    places, how = _places_of(gain), "better" if sign > 0 else "worse"
    amount = f"{expected.better} is {how} than {comparison.other} by {number(abs(gain.mean), places)}"
    if expected.margin > 0:
        amount += f", where at least {number(comparison.asked, places)} ({100 * expected.margin:g} %) was expected"
    elif expected.margin < 0:
        amount += f", where up to {number(-comparison.asked, places)} ({-100 * expected.margin:g} %) worse is allowed"
    if interval is None:
        return f"{amount} (a single seed, so there is no interval)"
    found = f"95 % interval {_span(interval, places)}; {gain.agreeing} of {gain.count} seeds agree"
    beyond = comparison.beyond if expected.margin else None
    if beyond is not None and beyond.interval is not None:
        found += f"; better than the margin by {_span(beyond.interval, places)}"
    return f"{amount} ({found})"


def _span(interval: Sequence[float], places: int) -> str:
    return " to ".join(number(end, places) for end in interval)


def main_table(results: StudyResults, quantities: Sequence[Quantity]) -> Table:
    """Mean ± standard deviation of each variant, and its paired difference to the reference.

    The differences are left out where there are many quantities, which would make the table too wide.
    """
    reference, compares = results.study.compared_with, len(quantities) <= MOST_COMPARED
    heads = ["variant" if compares else f"variant ({results.metric(quantities[0])})", "seeds"]
    for quantity in quantities:
        name = results.title(quantity) if compares else quantity.how
        heads.append(f"{name} {'↓' if quantity.lower_is_better else '↑'}")
        heads += [f"against {reference}"] if compares else []
    rows = []
    for variant in results.study.variants:
        row = [Cell(variant), Cell(seeds_text(results, variant))]
        for quantity in quantities:
            values = results.values(variant, quantity)
            row.append(Cell(summary_text(summarise(list(values.values())))))
            if compares:
                found = difference(values, results.values(reference, quantity))
                row.append(Cell("reference") if variant == reference else _difference_cell(found))
        rows.append(row)
    return heads, rows


def difference_table(results: StudyResults, quantities: Sequence[Quantity]) -> Table | None:
    """The paired differences to the reference, where `main_table` leaves them out."""
    if len(quantities) <= MOST_COMPARED:
        return None
    reference = results.study.compared_with
    heads = [f"against {reference} ({results.metric(quantities[0])})", *(quantity.how for quantity in quantities)]
    rows = []
    for variant in results.study.variants:
        if variant != reference:
            pairs = [(results.values(variant, one), results.values(reference, one)) for one in quantities]
            found = [difference(*pair) for pair in pairs]
            rows.append(
                [Cell(variant), *(Cell(difference_text(one), one is not None and one.certain) for one in found)]
            )
    return heads, rows


def paper_table(results: StudyResults) -> Table:
    """The paper's figures and ours, row by row; rows that only the paper has come last."""
    paper = results.study.paper
    assert paper is not None, "the study has the paper's figures"
    sampled = [quantity for quantity in results.quantities if quantity.steps is not None]
    quantities = list(dict.fromkeys([*results.study.decisive, *sampled]))
    heads = ["variant", *(f"paper: {column}" for column in paper.columns)]
    heads += [f"here: {results.title(quantity)}" for quantity in quantities]
    rows = []
    for name in dict.fromkeys([*results.study.variants, *paper.rows]):
        theirs = paper.rows.get(name, (None,) * len(paper.columns))
        row = [name, *("–" if cell is None else f"{cell:g}" if isinstance(cell, float) else cell for cell in theirs)]
        known = name in results.study.variants
        ours = [results.values(name, quantity) if known else {} for quantity in quantities]
        row += [summary_text(summarise(list(values.values()))) for values in ours]
        rows.append([Cell(text) for text in row])
    return heads, rows


def conditions(results: StudyResults) -> str:
    """How the values were measured, in a sentence or two."""
    measure, seeds = results.study.measure, results.study.seeds
    scores = [score for trial in results.trials for score in trial.scores.values() if score.t is None]
    several = f"{plural(len(seeds), 'training seed')} ({', '.join(map(str, seeds))})"
    text = f"Mean ± standard deviation over {several}. Differences are paired by seed, with a 95 % t-interval"
    comparisons = len(results.study.variants) - 1
    text += (
        ""
        if comparisons < 3
        else (f"; with {comparisons} comparisons in each column, an interval that barely excludes 0 may be chance")
    )
    if scores:
        one = scores[0]
        reference = "" if one.reference_count is None else f" ({one.reference_count:,} images)"
        text += (
            f". {one.count:,} samples of each model against {one.reference}{reference}, detector {one.detector} "
            f"{one.detector_hash[:8]}, {one.preprocessing}"
        )
    if measure.gradients:
        text += ". A spike is a line of metrics whose largest gradient norm exceeds three times the median around it"
    return f"{text}."


def failures(results: StudyResults) -> list[str]:
    """Why variants failed, a line for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for trial in results.trials:
        if trial.status == "failed":
            reasons.setdefault((trial.variant.name, last_line(trial.problem or "")), []).append(str(trial.variant.seed))
    return [
        f"{variant}, seed{'s' if len(seeds) > 1 else ''} {_list(seeds)}: {reason}"
        for (variant, reason), seeds in reasons.items()
    ]


def left_out(results: StudyResults) -> list[str]:
    """Why scores are missing of variants that did not fail, a line for each."""
    return [
        f"The scores of {trial.variant.name}, seed {trial.variant.seed}, are left out: {trial.problem}"
        for trial in results.trials
        if trial.problem and trial.status != "failed"
    ]


def seeds_text(results: StudyResults, variant: str) -> str:
    """How many seeds are measured, and what is missing: `3 of 5, 1 failed`."""
    trials = results.of(variant)
    done = sum(trial.status == "measured" for trial in trials)
    failed = sum(trial.status == "failed" for trial in trials)
    text = f"{done}" if done == len(trials) else f"{done} of {len(trials)}"
    return text + (f", {failed} failed" if failed else "")


def summary_text(summary: Summary | None) -> str:
    """Mean ± deviation, with two digits of the deviation.

    >>> summary_text(Summary(5, 93.274, 0.6123, None))
    '93.27 ± 0.61'
    """
    if summary is None:
        return "–"
    if summary.deviation is None:
        return number(summary.mean)
    places = _places_for(summary.deviation) if summary.deviation else _places(summary.mean, digits=3)
    return f"{number(summary.mean, places)} ± {summary.deviation:.{places}f}"


def difference_text(found: Difference | None) -> str:
    """A difference, its interval, and how many seeds agree.

    >>> difference_text(Difference(5, -1.234, (-1.5, -0.9), 5)), difference_text(Difference(5, 0.0, (0.0, 0.0), 5))
    ('−1.23 [−1.50, −0.90] 5/5', 'equal')
    """
    if found is None:
        return "–"
    if found.mean == 0 and found.interval in (None, (0, 0)):
        return "equal"
    places = _places_of(found)
    text = number(found.mean, places, sign=True)
    if found.interval is None:
        return text
    low, high = (number(end, places, sign=True) for end in found.interval)
    return f"{text} [{low}, {high}] {found.agreeing}/{found.count}"


def _difference_cell(found: Difference | None) -> Cell:
    return Cell(difference_text(found), found is not None and found.certain)


def number(value: float, places: int | None = None, sign: bool = False) -> str:
    """A number for people: three digits unless the places are given, and a real minus.

    >>> number(0.001234), number(1234.5), number(-2.5, 1)
    ('0.00123', '1,234', '−2.5')
    """
    places = _places(value, digits=3) if places is None else places
    return f"{value:{'+' if sign else ''},.{places}f}".replace("-", "−")


def by_kind(results: StudyResults) -> list[list[Quantity]]:
    """The quantities that share a table: those of one kind; denoising and gradients come last."""
    groups: dict[str, list[Quantity]] = {}
    for quantity in results.quantities:
        groups.setdefault(quantity.kind, []).append(quantity)
    return list(groups.values())


def tables(results: StudyResults) -> list[Table]:
    """The results, a table or two for each kind of measurement."""
    found = [(main_table(results, same), difference_table(results, same)) for same in by_kind(results)]
    return [table for pair in found for table in pair if table is not None]


def _places_of(found: Difference) -> int:
    half = None if found.interval is None else (found.interval[1] - found.interval[0]) / 2
    return _places_for(half) if half else _places(found.mean, digits=3)


def _places_for(uncertainty: float) -> int:
    """The places that show two digits of an uncertainty, and one at least below 100."""
    return max(_places(uncertainty), int(uncertainty < 100))


def _places(value: float, digits: int = 2) -> int:
    """The decimal places that show so many digits of a value."""
    if not isfinite(value) or value == 0:
        return digits - 1
    return max(0, digits - 1 - floor(log10(abs(value))))


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
