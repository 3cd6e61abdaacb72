"""The report's section about the moment to truncate: how a stage that a later one keeps frozen learned to denoise."""

from collections.abc import Sequence

from tcm.recipes.decided import noted_decision
from tcm.recipes.lineage import watching_roles
from tcm.report import figures
from tcm.report.drawing import ObservedRun
from tcm.report.html import figure, section, side_by_side
from tcm.report.records import RunRecord, StageRecord
from tcm.training.watching import read_curves


def watching(runs: Sequence[ObservedRun]) -> str:
    """The distances that were measured during training, with what was decided from them."""
    parts = []
    for run in (run.record for run in runs):
        colours = figures.series_of(run.stages)
        for stage in run.stages:
            if curves := read_curves(stage.lines):
                marked = [role.highest for role in watching_roles(run.recipe, stage.name) if role.highest is not None]
                svg = figures.watched(curves, marked, colours[stage.name])
                caption = f"{stage.name}: denoised distance at times around t′ (bold)." + _decisions(run, stage)
                named = f"{run.name}: {caption}" if len(runs) > 1 else caption
                parts.append(figure(svg, f"Denoised distance over the steps of {stage.name}", named))
    sentence = (
        "Truncate once the frozen model stops improving at t′: where its curve is flat. The "
        "distance is a cheap stand-in for dFID, in principal components of the pixels; only the curve's shape matters."
    )
    return section("When to truncate", sentence, side_by_side(parts)) if parts else ""


def _decisions(run: RunRecord, stage: StageRecord) -> str:
    """Why the stage ended, and what later ones decided from its curves."""
    later = run.stages[run.stages.index(stage) :]
    found = [(other.name, noted_decision(other.folder)) for other in later]
    return "".join(f" {name}: {decision.reason}." for name, decision in found if decision is not None)
