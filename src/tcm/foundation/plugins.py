"""Classes that people add from outside, found by Python's own means: an entry point or an import path."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tcm.foundation.errors import KeyInTable, TcmError, describe_first

Base = TypeVar("Base")


def find_class(key: str, name: str, ours: Mapping[str, type[Base]], base: type, group: str) -> type[Base]:
    """The class that `name`, the value of `key`, stands for.

    It is one of ours, an installed package's entry point in `group`, or `module:Class` of a module that Python can
    import: one from your Python path, never a file that came with a model or a recipe.
    """
    if name in ours:
        return ours[name]
    paths = [*(entry.value for entry in entry_points(group=group, name=name)), *([name] if ":" in name else [])]
    found = _imported(key, name, *paths[0].split(":", 1)) if paths else None
    if found is None:
        near = get_close_matches(name, ours, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(ours)}"
        raise KeyInTable(f"{key}={name!r} is unknown; {advice} (name your own class as module:Class)")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise KeyInTable(f"{key}={name!r} is not a subclass of {base.__name__}; name one that is")
    return cast(type[Base], found)


def all_classes(ours: Mapping[str, type[Base]], base: type, group: str) -> dict[str, type[Base]]:
    """Ours, and those of installed packages' entry points in `group`, by name."""
    return {**ours} | {
        entry.name: find_class("kind", entry.name, ours, base, group) for entry in entry_points(group=group)
    }


def read_table(table: object, key: str, find: Callable[[str], type]) -> object:
    """The object that a table describes; its `key` names the class, a pydantic model or a dataclass. Unknown
    keys are errors. What is not such a table is returned as it is, for the field to refuse."""
    if not isinstance(table, dict):
        return table
    if key not in table:
        raise KeyInTable(f"{key} is missing; add it")
    if not isinstance(table[key], str):
        return {key: table[key]}
    model = find(table[key])
    # pydantic accepts no config for a plain dataclass, and without one it ignores unknown keys.
    adapter: TypeAdapter[object] = TypeAdapter(
        cast(Any, model | None), config=ConfigDict(extra="forbid", allow_inf_nan=False)
    )
    try:
        return adapter.validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        within, problem = describe_first(error, model)
        raise (KeyInTable if within else TcmError)(problem) from error


def reader_of(ours: Mapping[str, type], base: type, group: str, usual: str | None = None) -> Callable[[object], object]:
    """A validator that reads a table by its `kind`: one of ours, an entry point of `group`, or `module:Class`.

    A table that has no `kind` is of the `usual` one.
    """

    def read(table: object) -> object:
        if usual is not None and isinstance(table, dict):
            table = {"kind": usual} | table
        return read_table(table, "kind", lambda kind: find_class("kind", kind, ours, base, group))

    return read


def _imported(key: str, name: str, module: str, attribute: str) -> object:
    if module not in sys.modules and _lies_in_working_folder(module):
        raise KeyInTable(f"{key}={name!r} is in the working folder; if you trust it, put that folder on PYTHONPATH")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
        remedy = "put its module on the Python path" if absent else "correct its module, or the name"
        raise KeyInTable(f"{key}={name!r} cannot be imported ({error}); {remedy}") from error


def _lies_in_working_folder(module: str) -> bool:
    """`python -m` puts the working folder on the path, which may hold a stranger's files."""
    found = find_spec(module.partition(".")[0]) if module.partition(".")[0].isidentifier() else None
    if found is None or found.origin is None:
        return False
    here = Path.cwd()
    trusted = {Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    return here in Path(found.origin).parents[:2] and here not in trusted
