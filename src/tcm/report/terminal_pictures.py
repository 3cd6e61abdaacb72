"""Pictures in a terminal: by kitty's protocol, as sixels, or as half blocks, whichever it can show best."""

import os
import re
import select
import sys
from base64 import b64encode
from collections.abc import Mapping
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor

from tcm.data.decode import png_of
from tcm.data.grid import image_grid
from tcm.report.terminal import preview

Way = Literal["kitty", "sixel", "blocks"]

KITTY_TERMS = ("xterm-kitty", "xterm-ghostty")
KITTY_PROGRAMS = ("WezTerm", "ghostty")
KITTY_CHUNK = 4096
SIXEL_COLOURS = 256
PICTURE_WIDTH = 512
COLUMNS = 8
ANSWER_SECONDS = 0.3


def show_images(images: Tensor, console: Console) -> None:
    """Draw uint8 images [n, C, H, W] in the terminal, as many in a row as fit."""
    way = way_to_show(os.environ, ask_attributes())
    if way == "blocks":
        columns = (console.width + 1) // (images.shape[3] + 1)
        console.print(preview(images, max(1, min(COLUMNS, columns))))
        return
    columns = min(COLUMNS, len(images))
    scale = max(1, PICTURE_WIDTH // (columns * images.shape[3]))
    picture = image_grid(images, columns, scale)
    console.file.write((kitty if way == "kitty" else sixel)(picture) + "\n")
    console.file.flush()


def way_to_show(environment: Mapping[str, str], attributes: str) -> Way:
    """How a terminal shows pictures, from its environment and its answer to `ask_attributes`.

    >>> way_to_show({"TERM": "xterm-kitty"}, ""), way_to_show({"TERM": "xterm-256color"}, "62;4;22")
    ('kitty', 'sixel')
    """
    kitty_like = (
        "KITTY_WINDOW_ID" in environment
        or environment.get("TERM") in KITTY_TERMS
        or environment.get("TERM_PROGRAM") in KITTY_PROGRAMS
    )
    if kitty_like and "TMUX" not in environment and "STY" not in environment:  # multiplexers swallow the protocol
        return "kitty"
    _level, *features = attributes.split(";")
    return "sixel" if "4" in features else "blocks"


def ask_attributes() -> str:
    """What the terminal says it can do, such as `62;4;22`, where 4 is sixel; nothing if there is no one to ask."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        return ""
    terminal = sys.stdin.fileno()
    usual = termios.tcgetattr(terminal)
    answer = ""
    try:
        tty.setcbreak(terminal)
        sys.stdout.write("\x1b[c")
        sys.stdout.flush()
        while not answer.endswith("c") and select.select([terminal], [], [], ANSWER_SECONDS)[0]:
            answer += os.read(terminal, 64).decode("ascii", "replace")
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, usual)
    found = re.search(r"\x1b\[\?([\d;]+)c", answer)
    return found[1] if found else ""


def kitty(picture: Image.Image) -> str:
    """A picture in kitty's graphics protocol: a PNG in chunks, each but the last announcing another."""
    text = b64encode(png_of(picture)).decode()
    chunks = [text[start : start + KITTY_CHUNK] for start in range(0, len(text), KITTY_CHUNK)]
    more = [1] * (len(chunks) - 1) + [0]
    first = ["a=T,f=100,"] + [""] * (len(chunks) - 1)
    return "".join(f"\x1b_G{keys}m={m};{chunk}\x1b\\" for keys, m, chunk in zip(first, more, chunks, strict=True))


def sixel(picture: Image.Image) -> str:
    """A picture as sixels: columns of six pixels, drawn once for each colour; at most 256 colours."""
    colours, indices = _palette(picture)
    height, width = indices.shape
    percent = (colours.astype(int) * 100 + 127) // 255
    palette = "".join(f"#{index};2;{red};{green};{blue}" for index, (red, green, blue) in enumerate(percent))
    bands = "-".join(_band(indices[top : top + 6]) for top in range(0, height, 6))
    return f'\x1bP0;1q"1;1;{width};{height}{palette}{bands}\x1b\\'


def _palette(picture: Image.Image) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The colours [n, 3] of a picture, and the index [H, W] of each pixel's."""
    pixels = np.asarray(picture.convert("RGB"))
    colours, indices = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) > SIXEL_COLOURS:
        return _palette(picture.convert("RGB").quantize(SIXEL_COLOURS))
    return colours, indices.reshape(pixels.shape[:2])


def _band(rows: NDArray[np.int64]) -> str:
    """Up to six rows of pixels: for each colour its bits in each column, repetitions counted."""
    weights = 1 << np.arange(len(rows))[:, None]
    lines = []
    for colour in np.unique(rows):
        bits = ((rows == colour) * weights).sum(0).tolist()
        runs = [(chr(63 + value), len(list(group))) for value, group in groupby(bits)]
        lines.append(f"#{colour}" + "".join(f"!{count}{mark}" if count > 3 else mark * count for mark, count in runs))
    return "$".join(lines)
