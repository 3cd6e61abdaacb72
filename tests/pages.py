"""What a report's page consists of, and what every page must be: one file that holds everything and points nowhere."""

import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self._in_heading = False
        self.source = path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_heading = tag == "h2"

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", self.source, flags=re.S))


def check(page: Page) -> Page:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
    for tag, attributes in page.elements:
        for name in ("src", "href"):
            assert name not in attributes or str(attributes[name]).startswith(("data:", "#")), (tag, attributes)
        if tag == "img":
            assert "alt" in attributes
            assert str(attributes["src"]).startswith("data:image/png;base64,")
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert [tag for tag, _ in page.elements].count("h1") == 1
    return page
