"""A report's page in a real browser."""

import shutil
from pathlib import Path

from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def look_at(browser: Browser, path: Path, scheme: str, width: int, pictures: int) -> None:
    """No errors, no requests, so many pictures, all there, nothing too wide, and text that can be read."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert messages == []
    assert requests[0].startswith("file:")
    assert all(url.startswith("data:") for url in requests[1:])
    images = page.evaluate("[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width])")
    assert len(images) >= pictures
    assert all(natural > 0 and shown > 0 for natural, shown in images)
    figures = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
    assert len(figures) >= 2
    assert min(figures) > 100
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground, ink = page.evaluate(
        "[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (_lightness(ground) > _lightness(ink)) == (scheme == "light")
    axis = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    assert abs(_lightness(axis) - _lightness(ground)) > 90, "the figures' text can be read"
    page.close()


def _lightness(colour: str) -> float:
    return sum(float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3
