"""A step of stage 2 against a step of stage 1: time, and peak memory in fresh processes."""

from collections.abc import Callable, Iterator

from benchmarks.cases import Case, ddpmpp, images, small, trainer
from benchmarks.harness import Row, Settings, in_fresh_process, interleave, peak_bytes, ratio, seconds
from tcm.data.loader import LoadedBatch
from tcm.training.precision import store_in_bfloat16
from tcm.training.trainer import Trainer

TITLE = "a step of stage 2 against a step of stage 1"
STAGES = ("consistency", "truncated")


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 6), (small(settings), 18)):
        runs = {stage: steps(case, stage) for stage in STAGES} | {"again": steps(case, "consistency")}
        times = interleave(settings, runs, rounds)
        rows += [
            seconds(f"{case.size}: stage 1", times["consistency"]),
            seconds(f"{case.size}: stage 2", times["truncated"]),
        ]
        rows.append(ratio(f"{case.size}: stage 2 / stage 1", times["truncated"], times["consistency"], "≤ 1.03"))
        rows.append(
            ratio(
                f"{case.size}: stage 1 / itself, which noise alone makes differ", times["again"], times["consistency"]
            )
        )
        rows += memory(case)
    return rows


def steps(case: Case, stage: str, *overrides: str) -> Callable[[], object]:
    """One more training step with each call."""
    recipe = case.recipe(*overrides)
    return stepping(trainer(recipe, stage), images(recipe, stage))


def stepping(training: Trainer, batches: Iterator[LoadedBatch]) -> Callable[[], object]:
    def step() -> None:
        loaded = next(batches)
        training.step(loaded.step, loaded)

    return step


def memory(case: Case) -> list[Row]:
    """Peak memory of both stages; what stage 2 needs beyond stage 1 and its frozen weights."""
    first, second, second_bf16 = (
        in_fresh_process(peak, case, stage, precision)
        for stage, precision in (("consistency", "fp32"), ("truncated", "fp32"), ("truncated", "bf16"))
    )
    weights = 4 * sum(parameter.numel() for parameter in trainer(case.recipe(), "truncated").student.parameters())
    excess = 100 * (second - first - weights) / first
    return [
        Row(f"{case.size}: peak memory of stage 1", first / 1e9, "GB"),
        Row(f"{case.size}: peak memory of stage 2", second / 1e9, "GB"),
        Row(f"{case.size}: … with frozen_precision = bf16", second_bf16 / 1e9, "GB"),
        Row(f"{case.size}: stage 2 beyond stage 1 + frozen weights", excess, "% of stage 1", goal="≤ 2 %"),
    ]


def peak(case: Case, stage: str, frozen_precision: str) -> float:
    """Peak bytes of a process that makes a step; the optimiser's state is there before it."""
    recipe = case.recipe(f"truncated.frozen_precision={frozen_precision}")
    training, batches = trainer(recipe, stage), images(recipe, stage)
    if "frozen" in training.models and frozen_precision == "bf16":
        store_in_bfloat16(training.models["frozen"].network)
    training.step(0, next(batches))
    return peak_bytes()
