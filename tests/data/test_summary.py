"""The figures of a data set, against numpy's on the whole array."""

import numpy as np
import pytest
import writers

from tcm.data import ArrayDataset, ClassLabels, open_dataset, summarize
from tcm.data.summary import sampled_deviation


def test_figures() -> None:
    images = writers.sample_pixels(50, height=9, width=7)
    images[10:14] = images[3]
    images[:, 1] //= 2
    labels = ClassLabels.of(np.arange(50) % 4, "the test", ["a", "b", "c", "d", "never"])
    summary = summarize(ArrayDataset(images, labels))
    floats = images / 127.5 - 1
    assert (summary.count, summary.shape, summary.duplicates) == (50, (3, 9, 7), 4)
    assert summary.class_counts == (("a", 13), ("b", 13), ("c", 12), ("d", 12), ("never", 0))
    assert summary.mean == pytest.approx(floats.mean(axis=(0, 2, 3)), abs=1e-12)
    assert summary.std == pytest.approx(floats.std(axis=(0, 2, 3)), abs=1e-12)
    assert summary.sigma_data == pytest.approx(floats.std(), abs=1e-12)


def test_constant_images_have_no_spread() -> None:
    summary = summarize(ArrayDataset(np.full((5000, 1, 3, 3), 77, np.uint8)))
    assert (summary.sigma_data, summary.duplicates, summary.class_counts) == (0, 4999, ())


def test_digits() -> None:
    summary = summarize(open_dataset("digits"))
    assert summary.sigma_data == pytest.approx(0.7518, abs=1e-4)
    assert summary.duplicates == 0


def test_large_images_are_read_a_few_at_a_time() -> None:
    class Large(ArrayDataset):
        read = 0

        def pixels(self, indices: np.ndarray) -> np.ndarray:
            self.read = max(self.read, len(indices))
            return super().pixels(indices)

    images = np.random.default_rng(0).integers(0, 256, (40, 3, 512, 512), dtype=np.uint8)
    dataset = Large(images)
    summary = summarize(dataset)
    assert dataset.read * images[0].nbytes <= 2**24
    assert summary.sigma_data == pytest.approx(images.std() / 127.5)
    assert sampled_deviation(dataset) == pytest.approx(summary.sigma_data)
