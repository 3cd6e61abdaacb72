"""What a terminal is sent holds the pixels, and it is sent what it can show."""

import os
import pty
import re
import select
import subprocess
import sys
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from launching import Launcher
from PIL import Image

import tcm
from tcm.data.grid import image_grid
from tcm.data.pixels import to_uint8
from tcm.report.terminal_pictures import kitty, sixel, way_to_show

TCM = Path(sys.executable).parent / "tcm"
pictures = st.tuples(st.integers(1, 20), st.integers(1, 9)).flatmap(lambda shape: arrays(np.uint8, (*shape, 3)))


def decode_kitty(text: str) -> np.ndarray:
    """The picture in a terminal's input, as kitty reads it."""
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", text)
    keys = [dict(pair.split("=") for pair in control.split(",")) for control, _ in parts]
    assert keys[0].items() >= {"a": "T", "f": "100"}.items()
    assert [key["m"] for key in keys] == ["1"] * (len(keys) - 1) + ["0"]
    assert max(len(chunk) for _, chunk in parts) <= 4096
    with Image.open(BytesIO(b64decode("".join(chunk for _, chunk in parts)))) as picture:
        return np.asarray(picture.convert("RGB"))


def decode_sixel(text: str) -> np.ndarray:
    """The picture in a terminal's input, as one with sixels draws it: [H, W, 3] in percent, −1 where nothing is."""
    header, body = re.fullmatch(r'.*\x1bP[\d;]*q"1;1;(\d+;\d+)(.*)\x1b\\.*', text, flags=re.S).groups()
    width, height = map(int, header.split(";"))
    drawn = np.full((height + 5, width, 3), -1)
    palette, colour, top, left = {}, None, 0, 0
    for defined, rgb, chosen, times, mark, move in re.findall(
        r"#(\d+);2;(\d+;\d+;\d+)|#(\d+)|(?:!(\d+))?([?-~])|([$-])", body
    ):
        if defined:
            palette[defined] = [int(part) for part in rgb.split(";")]
        elif chosen:
            colour = palette[chosen]
        elif move:
            top, left = (top, 0) if move == "$" else (top + 6, 0)
        else:
            for _ in range(int(times or 1)):
                rows = [top + bit for bit in range(6) if (ord(mark) - 63) >> bit & 1]
                drawn[rows, left] = colour
                left += 1
    assert (drawn[height:] == -1).all()
    return drawn[:height]


@given(pictures)
def test_kitty(pixels: np.ndarray) -> None:
    assert np.array_equal(decode_kitty(kitty(Image.fromarray(pixels))), pixels)


def test_kitty_sends_large_pictures_in_chunks() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    text = kitty(Image.fromarray(pixels))
    assert text.count("m=1") > 1
    assert np.array_equal(decode_kitty(text), pixels)


@given(pictures)
def test_sixel(pixels: np.ndarray) -> None:
    assert np.array_equal(decode_sixel(sixel(Image.fromarray(pixels))), (pixels.astype(int) * 100 + 127) // 255)


def test_sixel_has_at_most_256_colours() -> None:
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    pixels = np.stack([*np.meshgrid(ramp, ramp), np.zeros((64, 64), np.uint8)], axis=2)
    text = sixel(Image.fromarray(pixels))
    assert len(re.findall(r"#\d+;2;", text)) <= 256
    assert np.abs(decode_sixel(text) - pixels / 2.55).mean() < 5


@pytest.mark.parametrize(
    ("environment", "attributes", "way"),
    [
        ({"TERM": "xterm-kitty"}, "62;4", "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "", "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "65;4;6", "kitty"),
        ({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1", "TMUX": "/tmp/tmux"}, "1;2;4", "sixel"),
        ({"TERM": "xterm-256color"}, "62;4;22", "sixel"),
        ({"TERM": "xterm-256color"}, "64;1;14;40", "blocks"),
        ({"TERM": "xterm-256color"}, "4;1", "blocks"),
        ({}, "", "blocks"),
    ],
)
def test_the_way_follows_from_the_terminal(environment: dict[str, str], attributes: str, way: str) -> None:
    assert way_to_show(environment, attributes) == way


def in_terminal(arguments: list[str], environment: dict[str, str], answer: str) -> str:
    """What a command sends to a terminal, which answers the question for its attributes."""
    main, other = pty.openpty()
    child = subprocess.Popen([TCM, *arguments], stdin=other, stdout=other, stderr=other, env=environment)
    os.close(other)
    received, answered = b"", False
    while child.poll() is None or select.select([main], [], [], 0)[0]:
        if not select.select([main], [], [], 0.1)[0]:
            continue
        try:
            received += os.read(main, 65536)  # may end inside a character
        except OSError:  # the other end is closed
            break
        if b"\x1b[c" in received and not answered:
            os.write(main, answer.encode())
            answered = True
    os.close(main)
    text = received.decode()
    assert child.wait() == 0, text
    return text


@pytest.mark.parametrize("way", ["sixel", "blocks"])
def test_sample_shows(tmp_path: Path, way: str) -> None:
    term = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80"}
    ours = ("TMUX", "STY", "TERM_PROGRAM", "KITTY_WINDOW_ID", "NO_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    answer = "\x1b[?62;4;22c" if way == "sixel" else "\x1b[?62;22c"
    arguments = ["sample", "digits", "-n", "9", "--show", "--out", str(tmp_path / "grid.png")]
    text = in_terminal(arguments, environment | term, answer)
    images = to_uint8(tcm.load("digits").sample(9))
    if way == "sixel":
        expected = np.asarray(image_grid(images, columns=8, scale=8).convert("RGB"))
        assert np.array_equal(decode_sixel(text), (expected.astype(int) * 100 + 127) // 255)
    else:
        assert text.count("▀") == 9 * 8 * 4
        shade = images[0, 0, 0, 0].item()
        assert f"\x1b[38;2;{shade};{shade};{shade};48;2;" in text


def test_without_a_terminal_a_line_says_where_the_images_are(tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    code, text = Launcher(tmp_path).run("sample", "digits", "-n", "2", "--show", "--out", str(out))
    assert code == 0
    assert text.splitlines()[-1] == f"--show: the output is not a terminal with colours; the images are in {out}"
    assert "\x1b" not in text
    assert out.exists()
