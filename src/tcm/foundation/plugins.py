"""Classes that people add from outside, found by Python's own means: an entry point or an import path."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError, ValidationInfo

from tcm.foundation.errors import KeyInTable, TcmError, TcmWarning, describe_first

Base = TypeVar("Base")
Trust = bool | str | Sequence[str]
"""Modules that the user trusts, besides those in TCM_TRUST; True if it was the user who named the class."""

_START = os.path.realpath(os.curdir)
"""The working folder in which Python began, and which it may have put on the path."""
_LONGEST_NAME = 255


def find_class(key: str, name: str, ours: Mapping[str, type[Base]], base: type, group: str, trust: Trust) -> type[Base]:
    """The class that `name`, the value of `key`, stands for.

    It is one of ours, an installed package's entry point in `group`, or `module:Class`. A module that is not imported
    yet must come from the user's path, never from the working folder, and either the user has named it or trusts it.
    """
    if name in ours:
        return ours[name]
    entry = entry_point(group, name)
    if entry is None and ":" not in name:
        near = get_close_matches(name, ours, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(ours)}"
        shown = name[:_LONGEST_NAME]
        raise KeyInTable(f"{key}={shown!r} is unknown; {advice} (name your own class as module:Class)")
    if entry is None:
        found = _load(f"{key}={name!r}", name, trust)
    else:
        found = _load(f"{key}={name!r} ({entry.value})", entry.value, trust=True)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise KeyInTable(f"{key}={name!r} is not a subclass of {base.__name__}; name one that is")
    return cast(type[Base], found)


def all_classes(ours: Mapping[str, type[Base]], base: type, group: str) -> dict[str, type[Base]]:
    """Ours, and those of installed packages' entry points in `group`, by name; one that fails costs a warning."""
    found = dict(ours)
    for entry in _entry_points(group):
        try:
            found[entry.name] = find_class("kind", entry.name, ours, base, group, trust=True)
        except TcmError as error:
            package = (entry.dist and entry.dist.name) or "an installed package"
            text = f"a plug-in of {package} is left out: {error}; or update or uninstall {package}"
            warnings.warn(text, TcmWarning, stacklevel=2)
    return found


def entry_point(group: str, name: str) -> EntryPoint | None:
    """What an installed package declares under this name, or under another with this `module:Class`."""
    return next((entry for entry in _entry_points(group) if name in (entry.name, entry.value)), None)


def read_table(table: object, key: str, find: Callable[[str], type], trust: Trust) -> object:
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
        return adapter.validate_json(json.dumps(table), strict=True, context=trust)
    except ValidationError as error:
        within, problem = describe_first(error, model)
        raise (KeyInTable if within else TcmError)(problem) from error


def reader_of(
    ours: Mapping[str, type], base: type, group: str, usual: str | None = None
) -> Callable[[object, ValidationInfo], object]:
    """A validator that reads a table by its `kind`: one of ours, an entry point of `group`, or `module:Class`.

    A table that has no `kind` is of the `usual` one. The validation's context is the user's `Trust`; without one, as
    for a model's card, modules need the user's word.
    """

    def read(table: object, info: ValidationInfo) -> object:
        if usual is not None and isinstance(table, dict):
            table = {"kind": usual} | table
        trust: Trust = info.context or False
        return read_table(table, "kind", lambda kind: find_class("kind", kind, ours, base, group, trust), trust)

    return read


def _load(what: str, value: str, trust: Trust) -> object:
    """The object that `module:Class` names; `what` is the key and its value, for errors."""
    module, _, attribute = value.partition(":")
    plain = len(value) <= _LONGEST_NAME and all(part.isidentifier() for part in (*module.split("."), attribute))
    if not plain:
        raise KeyInTable(f"{what[:_LONGEST_NAME]} is not of the form module:Class; correct it")
    imported = getattr(sys.modules.get(module), "__dict__", {})
    if attribute in imported:
        return imported[attribute]
    if not _trusts(trust, module):
        raise KeyInTable(
            f"{what} would run the module {module}; if you trust it, set TCM_TRUST={module} in the environment, or "
            f'call tcm.load with trust="{module}"'
        )
    top = module.partition(".")[0]
    with _users_path():
        place = _place(top)
    if place != _place(top):
        raise KeyInTable(f"{what} is in the working folder; if you trust it, put that folder on PYTHONPATH")
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module may do anything
        absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        remedy = "put its module on the Python path" if absent else "correct its module, or the name"
        plain_words = isinstance(error, ImportError | AttributeError)
        problem = str(error) if plain_words else f"{type(error).__name__}: {error}"
        raise KeyInTable(f"{what} cannot be imported ({problem}); {remedy}") from error


def _trusts(trust: Trust, module: str) -> bool:
    """Whether the user has named a module, or trusts it or a package that it is in."""
    if trust is True:
        return True
    named = trust.split(",") if isinstance(trust, str) else trust or ()
    words = (*os.environ.get("TCM_TRUST", "").split(","), *named)
    return any(f"{module}.".startswith(f"{word.strip()}.") for word in words)


def _place(top: str) -> tuple[str, set[str]] | None:
    """Where Python would find a module that is not inside another: its file, and its folders."""
    try:
        spec = find_spec(top)
    except ValueError:  # it was made by hand
        return None
    if spec is None:
        return None
    folder, file = os.path.split(spec.origin or "")
    return file, set(map(os.path.realpath, spec.submodule_search_locations or [folder]))


def _entry_points(group: str) -> EntryPoints:
    """Of installed packages alone: the working folder may declare some too."""
    with _users_path():
        return entry_points(group=group)


@contextmanager
def _users_path() -> Iterator[None]:
    """The Python path without the working folder, which may hold a stranger's files, unless the user put it there.

    `python -m` and `python -c`, a notebook, and an empty part of PYTHONPATH put it there unasked. A folder that comes
    twice is on the path for another reason too: PYTHONPATH names it, or a package was installed from it.
    """
    main, parts = sys.modules["__main__"], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_script = getattr(main, "__spec__", None) is None and getattr(main, "__file__", None) is not None
    unasked = 0 if is_script or "" in sys.path or sys.flags.safe_path else 1
    if "" in parts and len(parts) > 1 and not any(_is_start(os.path.join(_START, part)) for part in parts if part):
        unasked += 1
    before, kept = sys.path, []
    for entry in before:
        if unasked and _is_start(entry):
            unasked -= 1
        elif entry:
            kept.append(entry)
    sys.path = kept
    try:
        yield
    finally:
        sys.path = before


def _is_start(entry: str) -> bool:
    return bool(entry) and os.path.realpath(entry) == _START
