"""The shipped digits detector: what it takes, and that its distance orders damage."""

import pytest
import torch

from tcm.evaluation.features import load_detector
from tcm.foundation.errors import TcmError


def test_shapes_and_names() -> None:
    detector = load_detector("digits")
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    features = detector.features(images)
    assert features.shape == (5, detector.dimension)
    assert features.dtype == torch.float32
    assert detector.probabilities(features).sum(1) == pytest.approx(torch.ones(5).double())
    assert "FID" not in detector.distance_name
    assert len(detector.hash) == 64


def test_other_images_are_refused() -> None:
    detector = load_detector("digits")
    with pytest.raises(TcmError, match=r"\(3, 32, 32\)"):
        detector.features(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(TcmError, match="uint8"):
        detector.features(torch.zeros(2, 1, 8, 8))
