"""fp32 means IEEE fp32, wherever a network computes: what torch would do by itself on an NVIDIA card is TF32."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inprocess import train
from launching import tiny_recipe
from torch.utils._python_dispatch import TorchDispatchMode

import tcm
from tcm.data import open_dataset
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import model_subject
from tcm.evaluation.features import load_detector
from tcm.evaluation.references import reference_of
from tcm.foundation.devices import best_device, fp32_products
from tcm.report.drawing import observe_run
from tcm.report.records import read_run

pytestmark = pytest.mark.long

BACKENDS = torch.backends


class Convolutions(TorchDispatchMode):
    """Notes what a card would compute each convolution in, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if name.startswith("conv"):
            direction = "backward" if name.endswith("backward") else "forward"
            self.seen.setdefault(direction, set()).add(BACKENDS.cudnn.conv.fp32_precision)
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def _tf32_by_default() -> Iterator[None]:
    """As in a process whose user, or whose torch, has turned TF32 on."""
    with fp32_products("tf32"):
        yield


def settings() -> list[str]:
    parts = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv)
    return [part.fp32_precision for part in parts]


def test_the_setting_ends_with_its_block() -> None:
    before = settings()
    with fp32_products("tf32"):
        assert settings() == ["tf32"] * 4
        with fp32_products("ieee"):
            assert settings() == ["ieee"] * 4
        with suppress(ZeroDivisionError), fp32_products("ieee"):
            raise ZeroDivisionError
        assert settings() == ["tf32"] * 4
    assert settings() == before


def test_a_setting_for_all_is_overruled() -> None:
    general = BACKENDS.fp32_precision
    try:
        BACKENDS.fp32_precision = "tf32"
        with fp32_products("ieee"):
            assert settings() == ["ieee"] * 4
    finally:
        BACKENDS.fp32_precision = general


def sample() -> None:
    tcm.load("digits").sample(2, steps=2)


def features() -> None:
    load_detector("digits").features(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))


def denoise() -> None:
    dataset, model = open_dataset("digits"), tcm.load("digits")
    reference = reference_of(dataset, "digits", load_detector("digits"))
    denoising_distances(model_denoise(model), dataset, [1.0], reference, model_subject(model, "m", None, 0), count=80)


@pytest.mark.usefixtures("_tf32_by_default")
@pytest.mark.parametrize("compute", [sample, features, denoise])
def test_sampling_and_evaluation(compute: Callable[[], None]) -> None:
    with Convolutions() as convolutions:
        compute()
    assert convolutions.seen == {"forward": {"ieee"}}


@pytest.mark.usefixtures("_tf32_by_default")
@pytest.mark.parametrize(("precision", "arithmetic"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_training_and_its_report(tmp_path: Path, precision: str, arithmetic: str) -> None:
    words = (
        'order=["diffusion"]',
        "diffusion.sample_every=0",
        "diffusion.warmup=0",
        f"diffusion.precision={precision}",
    )
    with Convolutions() as convolutions:
        train(tiny_recipe(2, *words), tmp_path / "run")
    # A precision of its own is compared with IEEE's at the start.
    expected = {"ieee", arithmetic}
    assert convolutions.seen == {"forward": expected, "backward": expected}
    with Convolutions() as convolutions:
        observe_run(read_run(tmp_path / "run"))
    assert convolutions.seen == {"forward": {"ieee"}}


@pytest.mark.gpu
@pytest.mark.skipif(best_device().type == "cpu", reason="no accelerator here")
@pytest.mark.usefixtures("_tf32_by_default")
def test_an_accelerator_computes_in_ieee_arithmetic() -> None:
    """Relative errors of a convolution: about 2⁻²⁴ in IEEE arithmetic, 2⁻¹¹ in TF32."""
    rng = np.random.default_rng(0)
    x, w = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((8, 64, 16, 16), (64, 64, 3, 3)))
    exact = torch.nn.functional.conv2d(x, w)
    with fp32_products("ieee"):
        found = torch.nn.functional.conv2d(x.float().to(best_device()), w.float().to(best_device())).cpu().double()
    assert float((found - exact).norm() / exact.norm()) < 1e-6
