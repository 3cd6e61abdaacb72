"""What a terminal can show of a report: a table of the headline, and a preview of samples."""

from collections.abc import Sequence

from rich.color import Color
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.report.headline import Row, best_value, speed_text, value_text

UPPER_HALF = "▀"


def preview(images: Tensor, columns: int = 8) -> Segments:
    """uint8 images [n, C, H, W] as text: a character shows two pixels, one above the other, in 24-bit colour.

    >>> Console().print(preview(to_uint8(model.sample(16)), columns=8))  # doctest: +SKIP
    """
    if images.ndim != 4 or columns < 1:
        raise TcmError(f"images of shape {list(images.shape)} in {columns} columns; give [n, C, H, W] and 1 or more")
    pixels = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    segments: list[Segment] = []
    for start in range(0, len(pixels), columns):
        row = pixels[start : start + columns]
        for top in range(0, row.shape[2], 2):
            for column, image in enumerate(row):
                segments += [Segment(" ")] if column else []
                segments += _half_blocks(image[:, top : top + 2])
            segments.append(Segment.line())
        # Between two rows of images, half a line is enough.
        segments.append(Segment.line())
    return Segments(segments[:-1])


def headline_table(rows: Sequence[Row]) -> Table:
    """The report's headline as a compact table; `headline_rows` makes the rows."""
    runs = {row.run.name for row in rows}
    scores = [row.score for row in rows if row.score is not None]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "stage", "sampling") if len(runs) > 1 else ("stage", "sampling"):
        table.add_column(name)
    for name in ("NFE", scores[0].metric if scores else "distance", "images/s"):
        table.add_column(name, justify="right")
    best = best_value(rows)
    for row in rows:
        named = [row.run.name] if len(runs) > 1 else []
        speed = speed_text(row.drawn.images_per_second)
        cells = [row.stage.name, row.drawn.way, f"{row.evaluations}", value_text(row), speed]
        bold = "bold" if row.score is not None and row.score.value == best else ""
        table.add_row(*named, *cells, style=bold)
    return table


def _half_blocks(pair: Tensor) -> list[Segment]:
    """One line of characters from two lines of pixels [3, 1 or 2, W]; the last of an odd number stands alone."""
    upper = pair[:, 0].T.tolist()
    lower = pair[:, 1].T.tolist() if pair.shape[1] > 1 else [None] * len(upper)
    return [Segment(UPPER_HALF, Style(color=_colour(a), bgcolor=_colour(b))) for a, b in zip(upper, lower, strict=True)]


def _colour(pixel: list[int] | None) -> Color | None:
    return None if pixel is None else Color.from_rgb(*pixel)
