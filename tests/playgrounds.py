"""Playgrounds in a real browser: what a page shows, as arrays, and what torch would show."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from playwright.sync_api import Browser, Page

import tcm
from tcm.data.pixels import to_uint8

Array = NDArray[np.uint8]
_visits = count()
DOCS = Path(__file__).parents[1] / "docs" / "playground.md"


def documented() -> list[list[str]]:
    """The arguments of each `tcm` command in docs/playground.md."""
    return [shlex.split(command) for command in re.findall(r"```sh\n *tcm (.*)\n", DOCS.read_text())]


@contextmanager
def opened(browser: Browser, path: Path, address: str = "", **options: object) -> Iterator[Page]:
    """A page that has drawn everything; afterwards: no message, no error, and no request but the page's own parts."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri() + address)
    page.wait_for_selector("body[data-state=done], body[data-state=failed]", timeout=120_000)
    assert page.locator("#problem").inner_text() == ""
    yield page
    assert said == []
    assert asked[0].startswith("file:")
    assert all(url.startswith(("blob:", "data:")) for url in asked[1:])
    context.close()


def go(page: Page, address: str) -> Page:
    """The page with other settings, which its address holds."""
    # A number of its own, which the page ignores: the address changes even if the settings are those that it had.
    page.evaluate(
        """address => new Promise(done => {
            addEventListener("hashchange", () => setTimeout(done), {once: true});
            location.hash = address;
        })""",
        f"{address}&visit={next(_visits)}",
    )
    settle(page)
    return page


def settle(page: Page) -> None:
    """Wait until everything that was asked of the model is on the screen."""
    page.wait_for_selector("body[data-waiting='0']")


def shown(page: Page, selector: str) -> Array:
    """The pixels [n, 4, H, W] of the canvases that a selector finds: red, green, blue and how opaque they are."""
    found = page.evaluate(
        """selector => [...document.querySelectorAll(selector)].map(canvas => {
            const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
            copy.drawImage(canvas, 0, 0);
            const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
            return [canvas.height, canvas.width, Array.from(data)];
        })""",
        selector,
    )
    images = [np.array(data, np.uint8).reshape(height, width, 4) for height, width, data in found]
    return np.stack(images).transpose(0, 3, 1, 2)


def sampled(page: Page, seeds: list[int], **settings: object) -> Array:
    """What the page's scripts make of some seeds."""
    code = "([seeds, settings]) => playground.sample(seeds, settings).then(pixels => Array.from(pixels))"
    return np.array(page.evaluate(code, [seeds, settings]), np.uint8)


def of_torch(images: torch.Tensor) -> Array:
    """Images in [-1, 1] as pixels, as the page shows them."""
    pixels = to_uint8(images)
    return pixels.expand(-1, 3, -1, -1).numpy()


def same_pixels(found: Array, expected: Array) -> None:
    """The same but for rounding: at most one level, in at most one pixel of a thousand; and all opaque."""
    assert found.shape[1] == 3 or found[:, 3].min() == 255
    found = found[:, :3]
    assert found.shape == expected.shape
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 1e-3
    assert len(np.unique(expected)) > 20, "a picture, not a plain surface"


def images_of(model: tcm.Model, seeds: range, **how: object) -> Array:
    return of_torch(model.sample(seeds=list(seeds), **how))
