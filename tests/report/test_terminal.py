"""The terminal's preview shows the pixels, its table the scores."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tcm.foundation.errors import TcmError
from tcm.report.drawing import observe_run
from tcm.report.headline import headline_rows
from tcm.report.records import read_run
from tcm.report.terminal import headline_table, preview


@pytest.mark.parametrize(("channels", "height"), [(1, 8), (3, 5)])
def test_each_pixel_is_drawn(channels: int, height: int) -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, channels, height, 4), np.uint8))
    lines: list[list] = [[]]
    for segment in preview(images, columns=2).segments:
        if segment.text == "\n":
            lines.append([])
        else:
            lines[-1].append(segment)
    rows = -(-height // 2)
    assert [len(line) for line in lines] == [9] * rows + [0] + [4] * rows + [0]
    for place, image in enumerate(images.expand(-1, 3, -1, -1)):
        for y in range(height):
            line = lines[place // 2 * (rows + 1) + y // 2]
            for x in range(4):
                style = line[place % 2 * 5 + x].style
                colour = style.color if y % 2 == 0 else style.bgcolor
                assert tuple(colour.triplet) == tuple(image[:, y, x].tolist())


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(TcmError, match=r"\[8, 8\]"):
        preview(torch.zeros(8, 8, dtype=torch.uint8))


def test_table(fair_run: Path) -> None:
    rows = headline_rows([observe_run(read_run(fair_run))])
    console = Console(file=io.StringIO(), width=80)
    console.print(headline_table(rows))
    text = console.file.getvalue()
    assert "digits distance" in text
    assert text.count("not measured") == 3
    assert rows[0].score is not None
    assert f"{int(rows[0].score.value):,}" in text
