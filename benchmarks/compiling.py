"""Steps of stage 2, whose target batches change their sizes, with and without torch.compile."""

import time
from collections.abc import Callable
from unittest.mock import patch

from benchmarks.cases import Case, images, small, trainer
from benchmarks.harness import Row, Settings, interleave, ratio
from benchmarks.stages import stepping

TITLE = "a step of stage 2 with torch.compile and without"
WARM = 4
"""Steps in which compiled code for one size, then for any size, is made."""


def measure(settings: Settings) -> list[Row]:
    case = small(settings)
    runs = {"eager": steps(case, compiled=False), "compiled": steps(case, compiled=True)}
    started = time.perf_counter()
    with patch.dict("os.environ", {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}):
        for _ in range(WARM):
            runs["compiled"]()
    took = time.perf_counter() - started
    times = interleave(settings, runs, rounds=9)
    return [
        Row(f"{case.size}: first {WARM} steps, with the compilation", took, "s"),
        ratio(f"{case.size}: speed compiled / eager, fp32", times["eager"], times["compiled"]),
    ]


def steps(case: Case, compiled: bool) -> Callable[[], object]:
    """One more step with each call."""
    recipe = case.recipe()
    training, batches = trainer(recipe, "truncated"), images(recipe, "truncated")
    models = training.models
    if compiled:
        for denoiser in (models.student, models.frozen):
            denoiser.network.compile()
    return stepping(training, batches)
