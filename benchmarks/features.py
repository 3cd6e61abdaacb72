"""Inception features: images/s of our forward pass against the published TorchScript, interleaved.

`python -m benchmarks.features`: both take the same CIFAR-sized noise and resize it; the TorchScript is frozen and runs
at the batch size that suits it best. About a minute on two idle cores (OMP_NUM_THREADS sets the threads).
"""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tcm.evaluation import inception, published
from tcm.evaluation.features import load_detector

IMAGES = 16
ROUNDS = 3
SCRIPT_BATCHES = (2, 4, 8)


def speed(run: Callable[[Tensor], object], images: Tensor, batch: int) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        for part in torch.split(images, batch):
            run(part)
    return len(images) / (time.perf_counter() - start)


def main() -> None:
    pixels = torch.randint(0, 256, (IMAGES, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    script = torch.jit.freeze(torch.jit.load(str(published.inception_file())).eval())
    detector, half = load_detector("inception"), load_detector("inception", precision="bf16")

    def scripted(part: Tensor) -> Tensor:
        return script((inception.resize(part.float()) - 128) / 128)

    contestants: dict[str, tuple[Callable[[Tensor], object], int]] = {
        f"frozen TorchScript, batch {batch}": (scripted, batch) for batch in SCRIPT_BATCHES
    }
    contestants["ours, fp32"] = (detector.features, IMAGES)
    contestants["ours, bf16"] = (half.features, IMAGES)
    for run, batch in contestants.values():
        speed(run, pixels[:batch], batch)
        speed(run, pixels[:batch], batch)
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, (run, batch) in contestants.items():
            measured[name].append(speed(run, pixels, batch))
    best = max(statistics.median(values) for name, values in measured.items() if name.startswith("frozen"))
    table = Table(title=f"Inception features, {torch.get_num_threads()} threads, median of {ROUNDS} interleaved rounds")
    for column in ("", "images/s", "ratio to the best TorchScript"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in measured.items():
        middle = statistics.median(values)
        table.add_row(name, f"{middle:.2f}", f"{middle / best:.2f}")
    with torch.inference_mode():
        difference = float((detector.features(pixels[:8]) - scripted(pixels[:8])).abs().max())
    Console().print(table)
    Console().print(f"largest difference of a feature: {difference:.1e}", highlight=False)


if __name__ == "__main__":
    main()
