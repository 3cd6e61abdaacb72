"""Tangents against differences: what half precision leaves of each, and what a step of each costs."""

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.cases import Case, ddpmpp, images, small, trainer
from benchmarks.harness import Row, Settings, in_fresh_process, interleave, peak_bytes, ratio, spread
from benchmarks.rounding import RATIOS, TIMES, difference, digits, mean_cosine, streams
from benchmarks.stages import steps
from tcm.method.conditions import Labels
from tcm.method.preconditioning import Denoiser
from tcm.method.tangents import tangent
from tcm.networks import DDPMppConfig, EDM2Config, NetworkConfig
from tcm.recipes.estimates import estimate

TITLE = "cosines with df/dt of differences and of tangents in half precision, for whole networks"
STEPS_TITLE = "a step by tangents against a step by differences"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
STAGES, TARGETS, PRECISIONS = ("consistency", "truncated"), ("difference", "tangent"), ("fp32", "bf16")


@dataclass(frozen=True)
class Subject:
    """A model, images to take its derivative at, and the precisions that this is bearable in on a CPU."""

    name: str
    f: Denoiser
    x: Tensor
    labels: Labels | None
    precisions: tuple[str, ...]
    rounds: int


def measure(settings: Settings) -> list[Row]:
    """Cosines with the derivative in fp32: the mean over the images, for each noise level."""
    rows = []
    for subject in subjects(settings):
        found: dict[str, list[float]] = {}
        for number in range(settings.rounds(subject.rounds)):
            compare(found, subject, number)
        rows += [spread(f"{subject.name}: {what}", values, "") for what, values in found.items()]
    return rows


def subjects(settings: Settings) -> list[Subject]:
    """The digits model; the paper's networks with random weights, in bf16 alone: fp16 takes a CPU minutes a pass."""
    f, x, labels = digits(16 if settings.quick else 256)
    sizes: dict[str, tuple[NetworkConfig, tuple[int, int, int]]] = {
        "DDPM++": (DDPMppConfig(channels=32) if settings.quick else DDPMppConfig(), (3, 32, 32)),
        "EDM2-S": (EDM2Config(channels=64) if settings.quick else EDM2Config(), (3, 64, 64)),
    }
    trained = Subject("digits", f, x, labels, ("bf16", "fp16"), 3)
    return [trained, *(random_weights(f"{name}, random weights", *size) for name, size in sizes.items())]


def random_weights(name: str, config: NetworkConfig, shape: tuple[int, int, int]) -> Subject:
    """A network whose last layers are not zero, as they are at the start."""
    torch.manual_seed(0)
    f = Denoiser(config.build(shape, None), shape).requires_grad_(False)
    for parameter in f.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter)) if parameter.ndim else parameter.fill_(0.7)
    return Subject(name, f, 0.5 * torch.randn(1, *shape), None, ("bf16",), 1)


def compare(found: dict[str, list[float]], subject: Subject, number: int) -> None:
    f, x = subject.f, subject.x
    eps = streams(number, len(x)).normal(x.shape[1:])

    def derivative(t: float) -> Tensor:
        times = torch.full((len(x),), t, dtype=torch.float64)
        return tangent(f, x + t * eps, times, eps, subject.labels).flatten(1)

    for t in TIMES:
        exact = derivative(t)
        for precision in subject.precisions:
            f.network.arithmetic = HALF[precision]
            ways = {f"difference, ratio {r}": difference(f, x, eps, subject.labels, t, r) for r in RATIOS}
            ways["tangent"] = derivative(t)
            f.network.arithmetic = None
            for way, rounded in ways.items():
                found.setdefault(f"{way}, {precision}, t = {t:g}", []).append(mean_cosine(exact, rounded))


def measure_steps(settings: Settings) -> list[Row]:
    """Time, interleaved, and peak memory in fresh processes; from data, where tangents cost more rows; distilled."""
    rows = []
    for case, rounds in ((small(settings), 4), (ddpmpp(settings), 2)):
        for stage, precision in product(STAGES, PRECISIONS):
            rows += compare_steps(settings, case, stage, precision, rounds)
        held = {target: in_fresh_process(peak, case, target) for target in TARGETS}
        what = f"{case.size}, truncated, fp32: tangent / difference, peak memory"
        rows.append(Row(what, held["tangent"] / held["difference"], "×"))
    return rows + measure_distilled(settings)


def measure_distilled(settings: Settings) -> list[Row]:
    """Steps of stage 2 with a teacher: two evaluations of it (Heun) by differences, one by tangents."""
    rows = []
    tiny = Case("digits", "digits", 16 if settings.quick else 128, channels=8)
    for case, rounds in ((tiny, 40), (small(settings), 4)):
        distilled = replace(case, name=f"{case.name}, distilled", teacher="diffusion")
        rows += compare_steps(settings, distilled, "truncated", "fp32", rounds)
    return rows


def compare_steps(settings: Settings, case: Case, stage: str, precision: str, rounds: int) -> list[Row]:
    words = {target: overrides(stage, target, precision) for target in TARGETS}
    times = interleave(settings, {target: steps(case, stage, *words[target]) for target in TARGETS}, rounds)
    flops = {target: step_flops(case, stage, words[target]) for target in TARGETS}
    by_rows = flops["tangent"] / flops["difference"]
    what = f"{case.size}, {stage}, {precision}: tangent / difference"
    scaled = [by_rows * time for time in times["difference"]]
    return [
        ratio(f"{what}, time", times["tangent"], times["difference"]),
        ratio(f"{what}, time in units of the rows' {by_rows:.2f}", times["tangent"], scaled, "≤ 1.3"),
    ]


def overrides(stage: str, target: str, precision: str) -> tuple[str, ...]:
    """Differences in half precision are under autocast, as they always are."""
    return (f"{stage}.target={target}", f"{stage}.precision={precision}")


def step_flops(case: Case, stage: str, words: tuple[str, ...]) -> int:
    recipe = case.recipe(*words)
    return estimate(recipe, recipe.stages[stage]).step_flops


def peak(case: Case, target: str) -> float:
    """Peak bytes of a process that makes a step."""
    recipe = case.recipe(f"truncated.target={target}")
    training = trainer(recipe, "truncated")
    training.step(0, next(images(recipe, "truncated")))
    return peak_bytes()
