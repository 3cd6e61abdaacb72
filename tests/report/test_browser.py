"""The report in a real browser: no errors, no requests, all pictures there, nothing too wide, in both themes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tcm.cli.main import app

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
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def reports(
    fair_run: Path, failed_run: Path, colour_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    wanted = {"fair": [fair_run], "failed": [failed_run], "side by side": [fair_run, failed_run, colour_run]}
    for name, runs in wanted.items():
        app(["report", *map(str, runs), "--out", str(folder / f"{name}.html")], standalone_mode=False)
    return {name: folder / f"{name}.html" for name in wanted}


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
@pytest.mark.parametrize("name", ["fair", "failed", "side by side"])
def test_page(browser: Browser, reports: dict[str, Path], name: str, scheme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(reports[name].as_uri())
    assert messages == []
    assert requests[0].startswith("file:")
    assert all(url.startswith("data:") for url in requests[1:])
    images = page.evaluate("[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width])")
    assert len(images) > 10
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


def test_prints_on_white(browser: Browser, reports: dict[str, Path]) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(reports["fair"].as_uri())
    page.emulate_media(media="print")
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")
    page.close()


def _lightness(colour: str) -> float:
    return sum(float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3
