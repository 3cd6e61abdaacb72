"""Each image of a grid is where it belongs."""

from pathlib import Path

import numpy as np
import pytest
import torch
import writers
from PIL import Image

from tcm.data import image_grid, save_grid
from tcm.foundation.errors import TcmError


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("columns", "scale", "gap"), [(None, 1, 1), (2, 3, 0), (9, 2, 2)])
def test_images_are_in_their_places(channels: int, columns: int | None, scale: int, gap: int) -> None:
    images = writers.sample_pixels(7, channels, 5, 4)
    sheet = np.atleast_3d(np.asarray(image_grid(torch.from_numpy(images), columns, scale, gap)))
    across = columns or 3
    down = -(-7 // across)
    assert sheet.shape == (scale * (down * (5 + gap) - gap), scale * (across * (4 + gap) - gap), channels)
    covered = np.zeros(sheet.shape, bool)
    for number, image in enumerate(images):
        top, left = scale * (number // across) * (5 + gap), scale * (number % across) * (4 + gap)
        cell = np.s_[top : top + 5 * scale, left : left + 4 * scale]
        np.testing.assert_array_equal(sheet[cell], image.transpose(1, 2, 0).repeat(scale, 0).repeat(scale, 1))
        covered[cell] = True
    assert (sheet[~covered] == 255).all()


def test_saved_as_png(tmp_path: Path) -> None:
    images = writers.sample_pixels(4)
    save_grid(tmp_path / "a.png", images, scale=2)
    with Image.open(tmp_path / "a.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), np.asarray(image_grid(images, scale=2)))


@pytest.mark.parametrize(
    "images", [np.zeros((0, 3, 8, 8), np.uint8), np.zeros((1, 2, 8, 8), np.uint8), np.zeros((1, 3, 8, 8))]
)
def test_impossible_grids(images: np.ndarray) -> None:
    with pytest.raises(TcmError, match="a grid takes"):
        image_grid(images)
    with pytest.raises(TcmError, match="scale=0"):
        image_grid(np.zeros((1, 3, 8, 8), np.uint8), scale=0)
