"""docs/recipes.md: its reference is today's schema, and its examples are recipes."""

import re
from pathlib import Path

import pytest
from key_tables import MARK, SECTIONS, meaning, renewed

from tcm.recipes.resolve import resolve, shipped

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_is_up_to_date() -> None:
    assert MARK in PAGE
    assert renewed(PAGE) == PAGE, "run `python tools/key_tables.py docs/recipes.md`"


def test_every_key_has_a_meaning_of_one_line() -> None:
    for _, model, _ in SECTIONS:
        for name in model.model_fields:
            assert re.fullmatch(r".{5,}", meaning(model, name)), f"{model.__name__}.{name}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples(tmp_path: Path, example: str) -> None:
    file = tmp_path / "example.toml"
    file.write_text(example, "utf-8")
    assert resolve(str(file)).network.channels == 128


def test_every_shipped_recipe_is_described() -> None:
    assert len(EXAMPLES) == 3
    for name in shipped():
        assert f"`{name}`" in PAGE.partition(MARK)[0]
