"""The report's curves, and the record of how the run was made."""

from collections.abc import Sequence
from html import escape

from tcm.foundation.counting import duration
from tcm.foundation.devices import best_device
from tcm.recipes.resolve import to_toml
from tcm.report import figures
from tcm.report.drawing import ObservedRun
from tcm.report.headline import denoising_curves, denoising_metric, measure_command
from tcm.report.html import Content, code, details, figure, html, paragraph, section, side_by_side, table
from tcm.report.records import RunRecord, StageRecord
from tcm.training.starts import start_now


def losses(runs: Sequence[ObservedRun]) -> str:
    """The loss by t of each stage; over its steps too, where it trains other models than the student."""
    parts = []
    for run in runs:
        colours = figures.series_of(run.record.stages)
        for stage in _begun(run.record):
            svg = figures.loss_by_time(run.record.recipe, stage, colours[stage.name])
            parts.append(_plot(svg, f"Loss by noise level, {stage.name}", _named(run, stage.name, runs)))
        for stage in (stage for stage in run.record.stages if stage.losses.keys() & set(stage.other_roles)):
            svg = figures.losses_over_steps([stage], colours)
            caption = _named(run, f"{stage.name}: the loss of each model that it trains, over its steps", runs)
            parts.append(_plot(svg, f"Loss over steps of the models of {stage.name}", caption))
    sentence = (
        "The loss at each noise level in the first, second and last third of a stage: where the curves differ, the "
        "model was still learning; where they coincide, it has learned what it can."
    )
    return section("Loss by noise level", sentence, side_by_side(parts)) if parts else ""


def stability(runs: Sequence[ObservedRun]) -> str:
    """Gradient norm of the stages that generate in one step, and what their objectives schedule."""
    everyone = [stage for run in runs for stage in _consistency(run.record) if stage.numbers]
    if not everyone:
        return ""
    limits = figures.gradient_limits(everyone)
    norms, schedules = [], []
    for run in runs:
        colours = figures.series_of(run.record.stages)
        stages = [stage for stage in _consistency(run.record) if stage.numbers]
        if stages:
            svg = figures.gradient_norms(stages, colours, limits)
            caption = "Gradient norm of the stages that generate in one step: the mean, with a band up to the maximum."
            norms.append(_plot(svg, "Gradient norm of the one-step stages", _named(run, caption, runs)))
            recipe = run.record.recipe
            captions = {
                name: stage.spec.schedule_captions.get(name, f"{name}, which changes over the steps.")
                for stage in stages
                for name in stage.spec.build(recipe).schedule(0)
            }
            for name, caption in captions.items():
                svg = figures.schedule(name, recipe, _consistency(run.record), colours)
                schedules.append(_plot(svg, f"{name} over steps", _named(run, caption, runs)))
    sentence = (
        "The paper's sign of stability: a stage whose gradient norm spikes again and again is near collapse; truncated "
        "training, which uses the hardest pairs from its first step, should not spike."
    )
    return section("Stability", sentence, _pairs(norms, schedules))


def trade_off(runs: Sequence[ObservedRun]) -> str:
    """dFID_t before and after truncation, and the time distributions that bring it about."""
    drawn, times = [], []
    for run in runs:
        record = run.record
        colours = figures.series_of(record.stages)
        t_prime = _t_prime(record)
        stages = [
            stage
            for stage in _consistency(record) or record.stages
            if stage.spec.build(record.recipe).times is not None
        ]
        caption = (
            "Where each stage's training times lie: truncated training uses only times above t′ (the peak there is "
            "cut off)."
        )
        if t_prime is None:
            caption = "Where each stage's training times lie."
        if stages:
            svg = figures.time_distributions(record.recipe, stages, colours, t_prime)
            times.append(_plot(svg, "Densities of the training times", _named(run, caption, runs)))
        curves = denoising_curves(run)
        finished = [stage for stage in _consistency(record) if stage.status == "finished"]
        if curves:
            metric = denoising_metric(run)
            svg = figures.denoising(curves, colours, t_prime, metric)
            caption = f"{metric} at t: data with noise of level t, denoised in one evaluation, against the data."
            drawn.append(_plot(svg, "Denoising distance over noise levels for each model", _named(run, caption, runs)))
        elif finished:
            commands = "".join(f"<li>{html(code(measure_command(record, s, None)))}</li>" for s in finished)
            drawn.append(
                f"<div>{paragraph(_named(run, 'dFID is not measured yet; these commands measure it:', runs), 'note')}"
                f'<ul class="commands">{commands}</ul></div>'
            )
    if any(_t_prime(run.record) is not None for run in runs):
        sentence = (
            "The idea of the method: left of t′ the truncated model may forget how to denoise, and its curve rises "
            "above the others; right of it, up to the pure noise where images are made, it should fall below them."
        )
    else:
        sentence = "How far denoised data is from the data at each noise level: the right end is generation."
    return section("The trade-off", sentence, _pairs(drawn, times))


def record(runs: Sequence[ObservedRun]) -> str:
    """Wall time, machine, versions, events, scores, recipe."""
    rows: list[list[Content]] = []
    for run in runs:
        for stage in run.record.stages:
            start = stage.starts[-1] if stage.starts else None
            many = f" ({len(stage.starts)} starts)" if len(stage.starts) > 1 else ""
            rows.append(
                [
                    _named(run, stage.name, runs),
                    f"{duration(stage.seconds)}{many}" if stage.numbers else "–",
                    f"{stage.spec.batch * stage.step:,}",
                    "not recorded" if start is None else _machine(start.machine, start.processes),
                    "not recorded" if start is None else start.versions,
                ]
            )
    now = start_now(best_device())
    made = f"This report, with its pictures and images/s, was made at {now.time} on {now.machine}; {now.versions}."
    parts = [table(["stage", "wall time", "images seen", "machine", "versions"], rows, "long"), paragraph(made, "note")]
    for run in runs:
        parts += [_events(run, runs), _scores(run, runs), _recipe(run, runs)]
    sentence = "Wall time excludes steps repeated after a restart."
    return section("How it was made", sentence, *parts)


def _events(run: ObservedRun, runs: Sequence[ObservedRun]) -> str:
    rows = [
        [stage.name, f"{line['step']:,}", str(line["event"]), str(line.get("reason", ""))]
        for stage in run.record.stages
        for line in stage.events
    ]
    if not rows:
        return ""
    shown = rows[-100:]
    title = _named(run, f"Events: {len(rows):,}", runs) + (", the last 100 are shown" if len(rows) > 100 else "")
    return details(title, table(["stage", "step", "event", "reason"], shown, "long"))


def _scores(run: ObservedRun, runs: Sequence[ObservedRun]) -> str:
    names = {drawing.hash: drawing.stage.name for drawing in run.drawings}
    rows: list[list[Content]] = [
        [
            names.get(score.subject_hash, score.subject),
            score.label,
            f"{score.value:.4g}" + ("" if score.deviation is None else f" ± {score.deviation:.2g}"),
            f"{score.count:,}",
            score.way,
            score.reference,
            score.time,
        ]
        for score in run.record.scores
    ]
    if not rows:
        return ""
    heads = ["model", "metric", "value", "images", "sampling", "reference", "measured at"]
    return details(_named(run, f"All {len(rows):,} scores", runs), table(heads, rows, "long"))


def _recipe(run: ObservedRun, runs: Sequence[ObservedRun]) -> str:
    return details(_named(run, "Recipe", runs), f"<pre>{escape(to_toml(run.record.recipe))}</pre>")


def _machine(machine: str, processes: int) -> str:
    return machine + (f", {processes} processes" if processes > 1 else "")


def _begun(run: RunRecord) -> list[StageRecord]:
    return [stage for stage in run.stages if stage.numbers]


def _consistency(run: RunRecord) -> list[StageRecord]:
    return [stage for stage in run.stages if stage.sampler.generates_at_once]


def _t_prime(run: RunRecord) -> float | None:
    """The t' of the last stage that has one."""
    found = [stage.forgets_below for stage in run.stages if stage.forgets_below is not None]
    return found[-1] if found else None


def _pairs(first: list[str], second: list[str]) -> str:
    """Two kinds of figures: next to each other for one run, below each other for several runs side by side."""
    if len(second) == 1:
        return side_by_side([*first, *second])
    return (side_by_side(first) if first else "") + side_by_side(second)


def _plot(svg: str, label: str, caption: str) -> str:
    return figure(svg, label, caption)


def _named(run: ObservedRun, text: str, runs: Sequence[ObservedRun]) -> str:
    """With the run's name in front where there are several."""
    return f"{run.record.name}: {text}" if len(runs) > 1 else text
