"""Detectors: the digits classifier again from its data, Inception against the published TorchScript, wrong files."""

from pathlib import Path

import digits_classifier
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tcm.data import open_dataset
from tcm.evaluation import inception, inception_weights
from tcm.evaluation.features import DIGITS_FILE, load_detector, weights_hash
from tcm.foundation.errors import TcmError


def test_the_shipped_digits_classifier_is_accurate_on_held_out_digits() -> None:
    dataset = open_dataset("digits")
    images, labels = dataset.read(np.arange(dataset.count))
    held_out = digits_classifier.split(dataset.count)[1]
    detector = load_detector("digits")
    features = detector.features(torch.from_numpy(images)[held_out])
    head = load_file(DIGITS_FILE)
    named = (features @ head["head.weight"].T + head["head.bias"]).argmax(1)
    assert float((named == labels.index[held_out]).double().mean()) == pytest.approx(358 / 359)


def test_training_the_digits_classifier_repeats() -> None:
    images, labels = open_dataset("digits").read(np.arange(400))
    runs = [digits_classifier.train(torch.from_numpy(images), labels.index, epochs=2) for _ in range(2)]
    assert weights_hash(runs[0].network.state_dict()) == weights_hash(runs[1].network.state_dict())


def test_tf1_resize_equals_grid_sampling_at_shifted_positions() -> None:
    images = torch.rand(2, 3, 32, 20, generator=torch.Generator().manual_seed(0)) * 255
    # Output pixel i reads input position i · 32/299; grid_sample wants that position in [-1, 1].
    rows = (torch.arange(299) * (32 / 299) * 2 + 1) / 32 - 1
    columns = (torch.arange(299) * (20 / 299) * 2 + 1) / 20 - 1
    grid = torch.stack([columns.expand(299, 299), rows.view(-1, 1).expand(299, 299)], -1).expand(2, -1, -1, -1)
    expected = functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    torch.testing.assert_close(inception.resize(images), expected, rtol=0, atol=2e-3)
    large = torch.rand(1, 3, 400, 299)
    assert inception.resize(large).shape == (1, 3, 299, 299)


class Steps(TorchDispatchMode):
    """Notes the operations that run inside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_resize_builds_its_matrices_once_for_each_size() -> None:
    """They were built again for every 8 images."""
    inception._interpolation.cache_clear()
    with Steps() as first, torch.inference_mode():
        detected = inception.resize(torch.rand(2, 3, 31, 17))
    with Steps() as later:
        resized = inception.resize(torch.rand(8, 3, 31, 17, requires_grad=True))
    assert "arange" in first.names
    assert "arange" not in later.names
    assert detected.shape[2:] == resized.shape[2:] == (299, 299)
    resized.sum().backward()  # what was built while detecting serves elsewhere, too
    with Steps() as other:
        inception.resize(torch.rand(1, 3, 31, 18))
    assert "arange" in other.names
    assert inception.resize(torch.rand(1, 3, 31, 17).double()).dtype == torch.float64


@pytest.fixture(scope="module")
def inception_file() -> Path:
    try:
        return inception_weights.inception_file()
    except TcmError as error:
        pytest.skip(f"the Inception weights cannot be had here: {error}")


def test_inception_features_agree_with_the_published_torchscript(inception_file: Path) -> None:
    images = photographs()
    x = (inception.resize(images.float()) - 128) / 128
    script = torch.jit.load(str(inception_file)).eval()
    with torch.no_grad():
        wants_pixels = inception_file.name == inception_weights.FILE
        expected = script(images, return_features=True) if wants_pixels else script(x)
    detector = load_detector("inception")
    found = detector.features(images)
    assert found.shape == (4, 2048)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert float(expected.abs().max()) > 1
    assert detector.distance_name == "FID"
    grey = images[:1, :1]
    torch.testing.assert_close(detector.features(grey), detector.features(grey.expand(-1, 3, -1, -1)))


def photographs() -> Tensor:
    """Smooth coloured shapes with texture, 4 × 3 × 48 × 64: nothing to fetch, nothing flat."""
    rows, columns = torch.meshgrid(torch.linspace(0, 6, 48), torch.linspace(0, 8, 64), indexing="ij")
    phase = torch.arange(12).view(4, 3, 1, 1) * 0.7
    waves = 100 * torch.sin(rows * (1 + phase / 4) + phase) * torch.cos(columns - phase)
    texture = 25 * torch.randn(4, 3, 48, 64, generator=torch.Generator().manual_seed(1))
    return (waves + texture + 128).clamp(0, 255).to(torch.uint8)


class Means(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))


class Picture(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images


def test_any_torchscript_file_is_a_detector(tmp_path: Path) -> None:
    torch.jit.script(Means()).save(str(tmp_path / "means.pt"))
    detector = load_detector(str(tmp_path / "means.pt"))
    assert (detector.name, detector.dimension) == ("means", 3)
    assert detector.distance_name == "Fréchet distance in means"
    assert torch.equal(detector.features(torch.full((2, 1, 5, 5), 7).byte()), torch.full((2, 3), 7.0))
    with pytest.raises(TcmError, match="no class head"):
        detector.probabilities(torch.zeros(1, 3))
    with pytest.raises(TcmError, match="4 channels"):
        detector.features(torch.zeros(1, 4, 8, 8).byte())


def test_wrong_detectors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match="is not known; use inception, digits, efficientnet-lite0"):
        load_detector("incepton")
    with pytest.raises(TcmError, match="precision='fp64'"):
        load_detector("digits", precision="fp64")
    text = tmp_path / "text.pt"
    text.write_text("no network")
    with pytest.raises(TcmError, match="not a TorchScript file"):
        load_detector(str(text))
    torch.save({"a": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(TcmError, match="not a TorchScript file"):
        load_detector(str(tmp_path / "weights.pt"))
    torch.jit.script(Picture()).save(str(tmp_path / "picture.pt"))
    with pytest.raises(TcmError, match="one row of features"):
        load_detector(str(tmp_path / "picture.pt"))


def test_a_damaged_cached_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    (tmp_path / inception_weights.FILE).write_bytes(b"half a download")
    with pytest.raises(TcmError, match=r"SHA-256 .* delete it"):
        load_detector("inception")
