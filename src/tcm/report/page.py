"""One self-contained page: no network, no scripts, light and dark, on paper too."""

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path

from tcm.foundation.errors import TcmError
from tcm.foundation.files import write_text
from tcm.report import curves, galleries, overview
from tcm.report.drawing import ObservedRun
from tcm.report.rounding import rounding
from tcm.report.watching import watching


def render(runs: Sequence[ObservedRun]) -> str:
    """The whole page of one run, or of several side by side."""
    title = " and ".join(run.record.name for run in runs)
    parts = [
        overview.top(runs),
        overview.headline(runs),
        overview.recipe_differences(runs),
        overview.in_progress(runs),
        galleries.same_seeds(runs),
        galleries.per_condition(runs),
        galleries.paths(runs),
        curves.trade_off(runs),
        watching(runs),
        curves.stability(runs),
        rounding(runs),
        curves.losses(runs),
        galleries.interpolations(runs),
        galleries.neighbours(runs),
        curves.record(runs),
    ]
    return whole_page(title, parts)


def whole_page(title: str, parts: Sequence[str], head: str = "") -> str:
    """A page of these parts, the empty ones left out; `head` is added to its <head>."""
    style = (files("tcm.report") / "style.css").read_text("utf-8")
    body = _distinct_ids("\n".join(part for part in parts if part))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{head}<link rel="icon" href="data:,">
<title>{escape(title)} · truncated consistency</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _distinct_ids(body: str) -> str:
    """Number the ids within each <svg>, so that no two elements of the page share one."""
    numbers = count(1)

    def rename(svg: re.Match[str]) -> str:
        own = f"figure-{next(numbers)}"
        return re.sub(r'( id="|"#|url\(#)', rf"\g<1>{own}-", svg[0])

    return re.sub(r"<svg.*?</svg>", rename, body, flags=re.S)


def write_report(runs: Sequence[ObservedRun], out: Path) -> None:
    """Write the page, whole or not at all.

    >>> write_report([observe_run(read_run(Path("runs/digits")))], Path("report.html"))  # doctest: +SKIP
    """
    write_page(out, render(runs))


def write_page(path: Path, text: str) -> None:
    """Write a file where a user asked for it, whole or not at all."""
    if path.is_dir():
        raise TcmError(f"--out={path} is a folder; name a file, such as {path / 'report.html'}")
    write_text(path, text)
