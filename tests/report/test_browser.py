"""The report in a real browser: no errors, no requests, all pictures there, nothing too wide, in both themes."""

from pathlib import Path

import pytest
from browsing import CHROMIUM, look_at
from playwright.sync_api import Browser

from tcm.cli.main import app

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium"),
]


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
    look_at(browser, reports[name], scheme, width, pictures=11)


def test_prints_on_white(browser: Browser, reports: dict[str, Path]) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(reports["fair"].as_uri())
    page.emulate_media(media="print")
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")
    page.close()
