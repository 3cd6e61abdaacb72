"""The page's curves: how the values develop over a stage, over the noise level, and how the gradients behave."""

from collections.abc import Sequence
from dataclasses import dataclass

from tcm.report.figures import gradient_limits
from tcm.report.html import figure, section, side_by_side
from tcm.studies import figures
from tcm.studies.figures import Line
from tcm.studies.results import StudyResults, Trial
from tcm.studies.schema import Quantity


@dataclass(frozen=True)
class Course:
    """One stage over its steps, with several seeds; `name` names the variants that share it, if not all do."""

    stage: str
    name: str
    trials: Sequence[Trial]

    @property
    def owners(self) -> str:
        """The variants in brackets, where they are not all."""
        return f" ({self.name})" if self.name else ""

    def line(self, quantity: Quantity, name: str, relative: bool = False) -> Line:
        """The values of one quantity over the steps; `relative` to each seed's first one."""
        points: dict[float, list[float]] = {}
        for trial in self.trials:
            steps = {step: scores[quantity] for step, scores in trial.courses[self.stage].items() if quantity in scores}
            first = steps[min(steps)].value if relative and steps else 1.0
            for step, score in steps.items():
                points.setdefault(step, []).append(score.value / first)
        return Line(name, points)

    def metric(self, quantity: Quantity) -> str:
        """What the quantity's metric is called, in the detector of the curves."""
        steps = (found for trial in self.trials for found in trial.courses[self.stage].values())
        return next(found[quantity].metric for found in steps if quantity in found)

    @property
    def quantities(self) -> list[Quantity]:
        """What there are values of."""
        steps = (scores for trial in self.trials for scores in trial.courses[self.stage].values())
        return list(dict.fromkeys(quantity for scores in steps for quantity in scores))

    @property
    def denoised(self) -> list[Quantity]:
        """Denoising, at each t that there are values of."""
        return [quantity for quantity in self.quantities if quantity.t is not None]


def over_training(results: StudyResults) -> str:
    """The measured stages over their steps: samples of all variants in one figure, denoising at each t by itself."""
    courses = _courses(results)
    stages = list(dict.fromkeys(course.stage for course in courses))
    parts = [_samples_over_steps([course for course in courses if course.stage == stage]) for stage in stages]
    denoising = [course for course in courses if course.denoised]
    drawn = [
        figure(
            figures.over_steps(
                [course.line(quantity, quantity.how, relative=True) for quantity in course.denoised],
                f"{course.metric(course.denoised[0])}, relative",
            ),
            f"Denoising distance over the steps of {course.stage}, relative to its first checkpoint",
            f"Denoising at each noise level over the steps of {course.stage}{course.owners}, divided by that of its "
            "first checkpoint: above 1 it has got worse, below 1 better.",
        )
        for course in denoising
    ]
    figures_ = [part for some in parts for part in some] + drawn
    if not figures_:
        return ""
    sentence = (
        "The averaged weights of each kept checkpoint, measured like the final model but with fewer samples: the mean "
        "over seeds, with a band from the lowest to the highest seed."
    )
    return section("Over training", sentence, side_by_side(figures_))


def denoising(results: StudyResults) -> str:
    """The final models' denoising over t."""
    by_t = {quantity.t: quantity for quantity in results.quantities if quantity.t is not None}
    lines = []
    for variant in results.study.variants:
        values = {t: list(results.values(variant, quantity).values()) for t, quantity in by_t.items()}
        points = {t: some for t, some in values.items() if some}
        lines += [Line(variant, points)] if points else []
    if not lines or len(by_t) < 2:
        return ""
    metric = results.metric(next(iter(by_t.values())))
    svg = figures.over_times(lines, metric)
    caption = f"{metric} at t: data with noise of level t, denoised in one evaluation, against the data."
    sentence = (
        "How far denoised data is from the data at each noise level; the right end is generation. A truncated model "
        "may forget how to denoise below its t′."
    )
    drawn = figure(svg, "Denoising distance over noise levels for each variant", caption)
    return section("Denoising", sentence, side_by_side([drawn]))


def gradients(results: StudyResults) -> str:
    """The gradient norms of the measured stages."""
    if not results.study.measure.gradients:
        return ""
    stages = {
        variant: [
            trial.stage for trial in results.of(variant) if trial.stage is not None and len(trial.stage.numbers) > 1
        ]
        for variant in results.study.variants
    }
    limits = gradient_limits([stage for some in stages.values() for stage in some])
    parts = [
        figure(figures.gradient_norms(some, limits), f"Gradient norm of {variant}", f"{variant} ({some[0].name})")
        for variant, some in stages.items()
        if some
    ]
    sentence = (
        "The largest gradient norm in each line of metrics, one thin line for each seed; circles are spikes, more than "
        "three times the usual norm around them."
    )
    return section("Gradient norms", sentence, side_by_side(parts)) if parts else ""


def _samples_over_steps(courses: Sequence[Course]) -> list[str]:
    sampled = dict.fromkeys(quantity for course in courses for quantity in course.quantities if quantity.t is None)
    parts = []
    for quantity in sampled:
        lines = [course.line(quantity, course.name) for course in courses if quantity in course.quantities]
        metric, how, stage = courses[0].metric(quantity), quantity.how, courses[0].stage
        caption = f"{metric}, {how}, over the steps of {stage}{courses[0].owners if len(lines) == 1 else ''}."
        parts.append(figure(figures.over_steps(lines, f"{metric}, {how}"), f"{metric} over {stage}", caption))
    return parts


def _courses(results: StudyResults) -> list[Course]:
    """The stages whose course was measured; one that several variants share appears once."""
    found: dict[tuple[str, frozenset[str]], list[str]] = {}
    trials: dict[tuple[str, frozenset[str]], list[Trial]] = {}
    for stage in results.study.measure.curve:
        for variant in results.study.variants:
            own = [trial for trial in results.of(variant) if stage in trial.courses]
            if own:
                key = stage, frozenset(_models(trial, stage) for trial in own)
                found.setdefault(key, []).append(variant)
                trials.setdefault(key, own)
    everyone = len(results.study.variants)
    return [
        Course(key[0], "" if len(names) == everyone else ", ".join(names), trials[key]) for key, names in found.items()
    ]


def _models(trial: Trial, stage: str) -> str:
    """What the checkpoints of a trial's stage are: the hashes of all."""
    hashes = {score.subject_hash for scores in trial.courses[stage].values() for score in scores.values()}
    return " ".join(sorted(hashes))
