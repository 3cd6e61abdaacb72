"""Pieces of the page: text is escaped here, pictures become data, and nothing points outside."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image
from torch import Tensor

from tcm.data.decode import png_of

CELL = 32
"""Small images are enlarged to at least this many pixels, so that the gap between them can be thin."""


@dataclass(frozen=True)
class Html:
    """Text that is HTML already."""

    text: str


Content = str | Html


def html(content: Content) -> str:
    """HTML as it is; anything else escaped.

    >>> html("a < b"), html(Html("<b>a</b>"))
    ('a &lt; b', '<b>a</b>')
    """
    return content.text if isinstance(content, Html) else escape(content)


def paragraph(content: Content, kind: str = "") -> str:
    """A paragraph, of a class if `kind` names one."""
    return f"<p{_class(kind)}>{html(content)}</p>"


def section(title: str, sentence: Content, *parts: str) -> str:
    """A section: its title, the sentence that says what to see, and what is to be seen."""
    anchor = "-".join(title.lower().split())
    body = "\n".join(parts)
    return (
        f'<section id="{escape(anchor)}">\n<h2>{escape(title)}</h2>\n{paragraph(sentence, "lead")}\n{body}\n</section>'
    )


def figure(content: str, label: str, caption: Content = "") -> str:
    """A figure with a text for those who cannot see it."""
    below = f"<figcaption>{html(caption)}</figcaption>" if caption else ""
    return f'<figure><div role="img" aria-label="{escape(label)}">{content}</div>{below}</figure>'


def side_by_side(parts: Sequence[str]) -> str:
    """Figures side by side, where the page is wide enough."""
    return f'<div class="side-by-side">{"".join(parts)}</div>'


def table(heads: Sequence[Content], rows: Sequence[Sequence[Content]], kind: str = "", caption: str = "") -> str:
    """A table whose first column names its rows."""
    head = "".join(f'<th scope="col">{html(cell)}</th>' for cell in heads)
    body = "\n".join(
        f'<tr><th scope="row">{html(row[0])}</th>{"".join(f"<td>{html(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table{_class(kind)}>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def details(summary: str, content: str) -> str:
    """Something to unfold."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def code(text: str) -> Html:
    """A command or a name, in the fixed-width type."""
    return Html(f"<code>{escape(text)}</code>")


def strip(images: Tensor, alt: str) -> str:
    """uint8 images [n, C, H, W] in one row, on a transparent ground."""
    return f'<img class="strip" style="--n:{len(images)}" alt="{escape(alt)}" src="{data_uri(row_png(images))}">'


def rows_of_images(rows: Sequence[tuple[Content, Tensor]], kind: str = "") -> str:
    """Labelled rows of images, one size for all; a row may be shorter than others."""
    most = max(len(images) for _, images in rows)
    lines = "\n".join(
        f'<div class="row"><div class="label">{html(label)}</div><div class="images">{strip(images, "")}</div></div>'
        for label, images in rows
    )
    return f'<div class="rows {kind}" style="--most:{most}">{lines}</div>'


def row_png(images: Tensor) -> bytes:
    """A PNG of images in a row, each pixel enlarged, thin gaps between them left transparent."""
    pixels = images.numpy()
    count, channels, height, width = pixels.shape
    scale = max(1, -(-CELL // min(height, width)))
    pixels = pixels.repeat(scale, 2).repeat(scale, 3)
    gap = max(1, pixels.shape[3] // 16)
    sheet = np.zeros((pixels.shape[2], count * (pixels.shape[3] + gap), channels + 1), np.uint8)
    for index, one in enumerate(pixels):
        left = index * (pixels.shape[3] + gap)
        sheet[:, left : left + pixels.shape[3], :channels] = one.transpose(1, 2, 0)
        sheet[:, left : left + pixels.shape[3], channels] = 255
    return png_of(Image.fromarray(sheet, "LA" if channels == 1 else "RGBA"))


def data_uri(png: bytes) -> str:
    """A PNG as part of the page."""
    return "data:image/png;base64," + b64encode(png).decode()


def _class(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""
