"""FID and KID equal torchmetrics' on the same images; it takes our detector as its feature network."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from tcm.data import open_dataset
from tcm.evaluation.features import load_detector
from tcm.evaluation.formulas import kernel_distance
from tcm.evaluation.references import observe
from tcm.method.gaussians import frechet_distance


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.detector = load_detector("digits")
        self.num_features = self.detector.dimension

    def forward(self, images: Tensor) -> Tensor:
        return self.detector.features(images.to(torch.uint8))


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(open_dataset("digits").read(np.arange(800))[0])
    noise = torch.randint(-40, 40, (400, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    return pixels[:400], (pixels[400:].int() + noise).clamp(0, 255).to(torch.uint8)


def test_frechet_distance(images: tuple[Tensor, Tensor]) -> None:
    theirs = FrechetInceptionDistance(feature=Ours(), input_img_size=(1, 8, 8)).set_dtype(torch.float64)
    theirs.update(images[0], real=True)
    theirs.update(images[1], real=False)
    detector = load_detector("digits")
    ours = frechet_distance(*(observe([part], detector).statistics for part in images))
    assert ours == pytest.approx(float(theirs.compute()), rel=1e-6)
    assert ours > 0.5


def test_kernel_distance(images: tuple[Tensor, Tensor]) -> None:
    theirs = KernelInceptionDistance(feature=Ours(), subsets=1, subset_size=400)
    theirs.update(images[0], real=True)
    theirs.update(images[1], real=False)
    detector = load_detector("digits")
    ours = kernel_distance(*(detector.features(part) for part in images), subsets=1)
    assert ours.mean == pytest.approx(float(theirs.compute()[0]), rel=1e-4)
