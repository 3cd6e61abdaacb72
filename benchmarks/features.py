"""Inception features: images/s of our forward pass against the published TorchScript.

Both take the same CIFAR-sized noise and resize it; the TorchScript is frozen and runs at the batch size that suits it
best. The network is fetched once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Row, Settings, interleave, ratio, spread
from tcm.evaluation import inception, inception_weights
from tcm.evaluation.features import load_detector

TITLE = "Inception features against the published TorchScript"
SCRIPT_BATCHES = (2, 4, 8)


def measure(settings: Settings) -> list[Row]:
    count = 4 if settings.quick else 8
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    script = torch.jit.freeze(torch.jit.load(str(inception_weights.inception_file())).eval())
    detector, half = load_detector("inception"), load_detector("inception", precision="bf16")

    def scripted(part: Tensor) -> Tensor:
        return script((inception.resize(part.float()) - 128) / 128)

    def over(run: Callable[[Tensor], object], batch: int) -> Callable[[], None]:
        def whole() -> None:
            with torch.inference_mode():
                for part in torch.split(pixels, batch):
                    run(part)

        return whole

    runs: dict[str, Callable[[], object]] = {
        f"frozen TorchScript, batch {batch}": over(scripted, batch) for batch in SCRIPT_BATCHES
    }
    runs |= {"ours, fp32": over(detector.features, count), "ours, bf16": over(half.features, count)}
    times = interleave(settings, runs, rounds=3, warm=2)
    rows = [spread(name, [count / value for value in values], "images/s") for name, values in times.items()]
    best = min((times[name] for name in list(runs)[: len(SCRIPT_BATCHES)]), key=sorted)
    rows += [ratio(f"speed of {name} / best TorchScript", best, times[name]) for name in list(runs)[-2:]]
    with torch.inference_mode():
        difference = float((detector.features(pixels[:8]) - scripted(pixels[:8])).abs().max())
    return [*rows, Row("largest difference of a feature, fp32", difference)]
