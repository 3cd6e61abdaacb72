"""What the stages' precisions cost, as measured when they began."""

from collections.abc import Sequence

from tcm.report.drawing import ObservedRun
from tcm.report.html import Content, paragraph, section, table
from tcm.report.records import RunRecord
from tcm.training.metrics import time_bins
from tcm.training.rounding import GOOD, bin_names, read_rounding


def rounding(runs: Sequence[ObservedRun]) -> str:
    """A table for each run with stages in another precision than fp32."""
    parts = []
    for run in runs:
        found = _table(run.record)
        if found and len(runs) > 1:
            parts.append(paragraph(run.record.name))
        parts.append(found)
    sentence = (
        "Cosines with what IEEE fp32 computes from the same weights and images: of the gradient, and of the difference "
        f"f(x_t) − f(x_r) of the pairs at each noise level. 1 means that rounding does nothing; below {GOOD} the "
        "stage learns partly from rounding."
    )
    return section("Rounding", sentence, *parts) if any(parts) else ""


def _table(run: RunRecord) -> str:
    found = {stage.name: rounding for stage in run.stages if (rounding := read_rounding(stage.lines)) is not None}
    if not found:
        return ""
    names = bin_names(time_bins(run.recipe.t_min, run.recipe.t_max))
    cosines = {stage: dict(zip(names, rounding.pairs, strict=False)) for stage, rounding in found.items()}
    shown = [name for name in names if any(some.get(name) is not None for some in cosines.values())]
    rows: list[list[Content]] = [
        [stage, rounding.precision, f"{rounding.gradient:.2f}", *(_text(cosines[stage].get(name)) for name in shown)]
        for stage, rounding in found.items()
    ]
    return table(["stage", "precision", "gradient", *shown], rows, "long")


def _text(cosine: float | None) -> str:
    return "–" if cosine is None else f"{cosine:.2f}"
