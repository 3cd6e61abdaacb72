"""docs/paper-to-code.md names only what exists."""

import re
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest

import tcm
from tcm.networks import NETWORKS
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import STAGES

PAGE = Path(__file__).parents[2] / "docs" / "paper-to-code.md"
TEXT = PAGE.read_text()
RECIPES = "\n".join(path.read_text() for path in (PAGE.parents[1] / "src/tcm/recipes").glob("*.toml"))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tcm\.[\w.]+)`", TEXT))))
def test_names_are_importable(name: str) -> None:
    resolve_name(name)


def test_settings_are_fields() -> None:
    rows = [row for row in TEXT.split("## Settings")[1].splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) > 15
    for row in rows:
        keys, arguments = row.strip("| ").split(" | ")[-2:]
        for argument in re.findall(r"`(\w+\.\w+)`", arguments):
            owner, field = argument.split(".")
            made = getattr(tcm, owner)
            known = {name for base in made.__mro__ for name in vars(base).get("__annotations__", {})}
            known |= set(made.__init__.__annotations__)
            assert field in known, argument
        for key in re.findall(r"`([\w.]+)`", keys):
            first, *inner = key.split(".")
            tables = (Recipe, *STAGES.values(), *NETWORKS.values())
            assert any(first in table.model_fields for table in tables), key
            stated = all(re.search(rf"\b{name}\b", RECIPES) for name in inner)
            assert stated or inner[0] in {field.name for field in fields(tcm.Curriculum)}, key
