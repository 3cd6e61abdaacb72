"""Text is escaped, pictures keep their pixels."""

import io
from html.parser import HTMLParser

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from tcm.report.html import code, figure, html, row_png, section, table

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"))


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def _parse(text: str) -> _Text:
    parser = _Text()
    parser.feed(text)
    parser.close()
    return parser


@given(TEXT)
def test_any_text_stays_text(text: str) -> None:
    assert _parse(html(text)).text == text
    assert _parse(code(text).text).tags == ["code"]
    assert _parse(section(text, text)).tags == ["section", "h2", "p"]
    assert text in _parse(figure("", text, text)).attributes
    assert _parse(table([text], [[text, text]])).tags == [
        "div",
        "table",
        "thead",
        "tr",
        "th",
        "tbody",
        "tr",
        "th",
        "td",
    ]


@given(arrays(np.uint8, st.tuples(st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 40), st.integers(1, 40))))
def test_a_row_keeps_every_pixel(images: np.ndarray) -> None:
    picture = Image.open(io.BytesIO(row_png(torch.from_numpy(images)))).convert("RGBA")
    pixels = np.asarray(picture)
    count, _, height, width = images.shape
    scale = pixels.shape[0] // height
    step = pixels.shape[1] // count
    for place, image in enumerate(images):
        shown = pixels[::scale, place * step : place * step + width * scale : scale]
        np.testing.assert_array_equal(shown[..., :3], np.broadcast_to(image.transpose(1, 2, 0), (height, width, 3)))
        assert (shown[..., 3] == 255).all()
        assert (pixels[:, place * step + width * scale : (place + 1) * step, 3] == 0).all()
