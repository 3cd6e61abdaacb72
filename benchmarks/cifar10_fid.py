"""FID on real CIFAR-10 with the real Inception: halves of the training set, the test set, and damaged images.

`python -m benchmarks.cifar10_fid FOLDER [HALF [DAMAGED]]`: about 1.5 hours on one idle core with 5,000 images for each
half and 2,000 for each damage. Features are kept in FOLDER in parts, so it can be stopped and started again;
docs/results.md has the figures. Needs `tcm data fetch cifar10`.
"""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tcm.data import open_dataset
from tcm.evaluation.features import Detector, load_detector
from tcm.evaluation.formulas import kernel_distance
from tcm.foundation.files import atomic_write
from tcm.method.gaussians import Statistics, frechet_distance

Pixels = NDArray[np.uint8]
Damage = Callable[[Pixels, int], Pixels]
PART = 250


def noise(deviation: float) -> Damage:
    def damage(image: Pixels, index: int) -> Pixels:
        added = np.random.default_rng([7, index]).normal(0, deviation, image.shape)
        return np.clip(np.round(image + added), 0, 255).astype(np.uint8)

    return damage


def blur(radius: float) -> Damage:
    return lambda image, _: np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)))


def jpeg(quality: int) -> Damage:
    def damage(image: Pixels, _: int) -> Pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return damage


DAMAGES: dict[str, Damage] = {
    "noise5": noise(5),
    "blur0.5": blur(0.5),
    "jpeg90": jpeg(90),
    "noise20": noise(20),
    "blur1.0": blur(1.0),
    "jpeg50": jpeg(50),
}


def features(folder: Path, name: str, images: Pixels, detector: Detector, damage: Damage | None = None) -> Tensor:
    """Features of uint8 images [n, 32, 32, 3]; parts that FOLDER already holds are not computed again."""
    parts = []
    for start in range(0, len(images), PART):
        file = folder / f"{name}-{start:05d}.npy"
        if not file.exists():
            part = images[start : start + PART]
            if damage is not None:
                part = np.stack([damage(image, start + i) for i, image in enumerate(part)])
            found = detector.features(torch.tensor(part).permute(0, 3, 1, 2))
            with atomic_write(file) as target:
                np.save(target, found.numpy())
        parts.append(torch.from_numpy(np.load(file)))
    return torch.cat(parts)


def main(folder: Path, half: int = 5000, damaged: int = 2000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    detector = load_detector("inception")
    train, test = open_dataset("cifar10"), open_dataset("cifar10", split="test")
    order = np.random.default_rng(0).permutation(train.count)
    first, second = (train.pixels(order[start : start + half]).transpose(0, 2, 3, 1) for start in (0, 5000))
    tested = features(folder, "test", test.pixels(np.arange(test.count)).transpose(0, 2, 3, 1), detector)
    one, other = features(folder, "first", first, detector), features(folder, "second", second, detector)
    rows = [
        ("train", one, f"{half:,} others of train", other),
        ("train", one, "test", tested),
        ("others of train", other, "test", tested),
        ("both", torch.cat([one, other]), "test", tested),
        ("train", one[:damaged], "test", tested),
    ]
    for name, damage in DAMAGES.items():
        rows.append((f"train, {name}", features(folder, name, first[:damaged], detector, damage), "test", tested))
    table = Table("images", "N", "reference", "its N", "FID", "KID × 1000", title="CIFAR-10, Inception 2015-12-05")
    for name, found, against, reference in rows:
        distance = frechet_distance(Statistics.of(found), Statistics.of(reference))
        kernel = kernel_distance(found, reference)
        measured = f"{distance:.2f}", f"{1000 * kernel.mean:.2f} ± {1000 * kernel.deviation:.2f}"
        table.add_row(name, f"{len(found):,}", against, f"{len(reference):,}", *measured)
    Console(width=110).print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *(int(number) for number in sys.argv[2:]))
