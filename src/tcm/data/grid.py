"""Many images as one picture."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tcm.data.dataset import Pixels
from tcm.data.decode import picture_of
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write

FONT, LINE, GAP, MOST_LINES = 11, 13, 6, 3
"""Of captions in a grid: the size of letters and of a line, the space around cells, the lines of a caption."""


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


def captioned_grid(
    images: Pixels | Tensor, captions: Sequence[str], columns: int | None = None, scale: int = 1
) -> Image.Image:
    """Lay out images with a caption below each; one that is empty leaves its room to the caption before it."""
    array = images.cpu().numpy() if isinstance(images, Tensor) else images
    columns = columns or math.ceil(math.sqrt(len(array)))
    height, width = array.shape[2] * scale, array.shape[3] * scale
    font = ImageFont.load_default(FONT)
    rows = [list(captions[start : start + columns]) for start in range(0, len(captions), columns)]
    lines = [[_wrapped(text, _room(row, at) * width, font) for at, text in enumerate(row)] for row in rows]
    depths = [LINE * max(len(wrapped) for wrapped in row) + GAP for row in lines]
    sheet = Image.new("RGB", (columns * (width + GAP), sum(height + depth for depth in depths)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for number, (row, depth) in enumerate(zip(lines, depths, strict=True)):
        for at, wrapped in enumerate(row):
            picture = picture_of(array[number * columns + at]).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(picture, (at * (width + GAP), top))
            for line, text in enumerate(wrapped):
                draw.text((at * (width + GAP), top + height + line * LINE), text, "black", font)
        top += height + depth
    return sheet


def _room(row: list[str], at: int) -> int:
    """The cells that a caption may use: its own, and those after it without one."""
    following = row[at + 1 :]
    return 1 + next((index for index, text in enumerate(following) if text), len(following))


def _wrapped(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """A text in lines of this width, at most three."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1]}…"]


def save_picture(path: str | Path, picture: Image.Image) -> None:
    """Write a picture as a PNG, whole or not at all."""
    with atomic_write(path) as file:
        picture.save(file, format="PNG")


def save_grid(
    path: str | Path, images: Pixels | Tensor, columns: int | None = None, scale: int = 1, gap: int = 1
) -> None:
    """Write `image_grid` as a PNG, whole or not at all."""
    save_picture(path, image_grid(images, columns, scale, gap))
