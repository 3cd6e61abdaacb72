"""Many images as one picture."""

import math
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from tcm.data.dataset import Pixels
from tcm.data.decode import picture_of
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write


def image_grid(images: Pixels | Tensor, columns: int | None = None, scale: int = 1, gap: int = 1) -> Image.Image:
    """Lay out images (uint8 [n, C, H, W]) row by row on white, `gap` pixels apart; by default in a square.

    `scale` enlarges each pixel to scale × scale, so that 8×8 digits can be seen.

    >>> image_grid(np.zeros((6, 3, 8, 8), np.uint8), columns=3, scale=2, gap=0).size
    (48, 32)
    """
    array = images.cpu().numpy() if isinstance(images, Tensor) else images
    if array.ndim != 4 or array.dtype != np.uint8 or array.shape[1] not in (1, 3) or 0 in array.shape:
        raise TcmError(f"images have shape {array.shape} and dtype {array.dtype}; a grid takes uint8 [n, 1 or 3, H, W]")
    if scale < 1 or gap < 0 or (columns is not None and columns < 1):
        raise TcmError(f"columns={columns} and scale={scale} must be at least 1, gap={gap} at least 0")
    count, channels, height, width = array.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    cells = np.full((rows * columns, channels, height + gap, width + gap), 255, np.uint8)
    cells[:count, :, :height, :width] = array
    sheet = cells.reshape(rows, columns, channels, height + gap, width + gap).transpose(2, 0, 3, 1, 4)
    sheet = sheet.reshape(channels, rows * (height + gap), columns * (width + gap))
    picture = picture_of(sheet[:, : sheet.shape[1] - gap, : sheet.shape[2] - gap])
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def save_grid(
    path: str | Path, images: Pixels | Tensor, columns: int | None = None, scale: int = 1, gap: int = 1
) -> None:
    """Write `image_grid` as a PNG, whole or not at all."""
    picture = image_grid(images, columns, scale, gap)
    with atomic_write(path) as file:
        picture.save(file, format="PNG")
