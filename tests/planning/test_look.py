"""What a plan sees in data: distances and mirror images, against data made to be of one kind or the other."""

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from tcm.data import open_dataset
from tcm.data.dataset import ArrayDataset, ClassLabels
from tcm.data.mirroring import mirror_test
from tcm.planning.look import farthest, look_at

RNG = np.random.default_rng(0)


def noise(count: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


def test_farthest_is_the_largest_distance() -> None:
    pixels = noise(50, 3, 5, 7)
    assert farthest(pixels) == pytest.approx(pdist(pixels.reshape(50, -1) / 127.5).max())


@pytest.mark.parametrize("width", [1, 7, 8, 33, 64])
def test_noise_may_be_mirrored(width: int) -> None:
    assert mirror_test(noise(400, 3, 12, width), {}).safe


def test_symmetric_images_may_be_mirrored() -> None:
    half = noise(200, 1, 8, 8)
    test = mirror_test(np.concatenate([half, half[..., ::-1]], axis=-1), {})
    assert (test.safe, test.accuracy) == (True, 0.5)


def test_a_mark_in_a_corner_must_not_be_mirrored() -> None:
    """Text, a logo: what is always at the same side."""
    pixels = noise(400, 3, 16, 16)
    pixels[:, :, :4, :4] //= 2
    test = mirror_test(pixels, {})
    assert not test.safe
    assert test.accuracy > 0.9


def test_one_class_is_enough() -> None:
    pixels = noise(1000, 1, 8, 8)
    pixels[:100, :, 1:5, 0] = 255
    flags = np.arange(1000) < 100
    test = mirror_test(pixels, {"flags": flags, "others": ~flags})
    assert (test.group, test.safe) == ("flags", False)
    assert mirror_test(pixels[100:], {}).safe


def test_small_classes_have_no_say() -> None:
    pixels = noise(1000, 1, 8, 8)
    few = np.arange(1000) < 20
    pixels[few, :, :, 0] = 255
    assert mirror_test(pixels, {"few": few}).group == "all images"


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_handful_of_images(count: int) -> None:
    labels = ClassLabels.of(np.zeros(count, np.int64), "here", ("only",))
    look = look_at(ArrayDataset(noise(count, 3, 8, 8), labels))
    assert look.summary.count == count
    assert 0 <= look.mirror.accuracy <= 1


def test_digits_are_not_mirrored() -> None:
    look = look_at(open_dataset("digits"))
    assert not look.mirror.safe
    assert 9 < look.farthest < 10
