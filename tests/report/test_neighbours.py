"""Nearest training images against brute force, and a planted copy."""

import numpy as np
import torch
from scipy.spatial.distance import cdist

from tcm.data import ArrayDataset, open_dataset
from tcm.evaluation.features import load_detector
from tcm.report import neighbours
from tcm.report.neighbours import closeness, nearest

RANDOM = np.random.default_rng(0)


def test_against_brute_force(monkeypatch) -> None:
    monkeypatch.setattr(neighbours, "CHUNK_BYTES", 7 * 90 * 4)
    images = RANDOM.integers(0, 256, (40, 3, 6, 5), np.uint8)
    samples = RANDOM.integers(0, 256, (9, 3, 6, 5), np.uint8)
    truth = cdist(samples.reshape(9, -1).astype(float), images.reshape(40, -1).astype(float)) / 90**0.5
    found = nearest(torch.from_numpy(samples), ArrayDataset(images), k=3)
    np.testing.assert_allclose(found.distances, np.sort(truth, 1)[:, :3], rtol=1e-5)
    np.testing.assert_array_equal(found.images, images[np.argsort(truth, 1)[:, :3]])


def test_by_features() -> None:
    digits, detector = open_dataset("digits"), load_detector("digits")
    samples = torch.from_numpy(digits.pixels(np.array([5, 900])))
    found = nearest(samples, digits, k=1, detector=detector)
    assert torch.equal(found.images[:, 0], samples)


def test_copies_are_closer_than_training_images_are_to_each_other() -> None:
    digits = open_dataset("digits")
    copies = torch.from_numpy(digits.pixels(np.arange(20)))
    close = closeness(copies, digits)
    assert close.samples == 0
    assert close.training > 10
    noise = torch.from_numpy(RANDOM.integers(0, 256, (20, 1, 8, 8), np.uint8))
    assert closeness(noise, digits).samples > 2 * close.training
