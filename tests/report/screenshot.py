"""The README's pictures, of a report or of a playground that has drawn everything:
`PYTHONPATH=tests python tests/report/screenshot.py report.html docs/images/report.png [HEIGHT]`.
"""

import sys
from pathlib import Path

from browsing import CHROMIUM, FLAGS
from playwright.sync_api import sync_playwright


def shoot(report: Path, picture: Path, height: int, scheme: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("body:not([data-state]), body[data-state=done]")
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    source, target, *rest = sys.argv[1:]
    shoot(
        Path(source), Path(target), int(rest[0]) if rest else 1080, "dark" if "dark" in Path(target).stem else "light"
    )
