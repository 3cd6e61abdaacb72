"""Files of nested tables: TOML read, merged and written."""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from importlib.resources import files
from os.path import normpath
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tcm.foundation.errors import TcmError
from tcm.foundation.files import read_regular

Tree = dict[str, Any]

DEEPEST = 50
"""Tables within tables of a file."""

UNSET = "none"
"""How TOML, which has no null, says that an optional key is not set."""

TAGS = ("objective", "kind")
"""Keys that decide which other keys a table has."""


def shipped_in(package: str) -> list[str]:
    """The names of the TOML files that come with a package."""
    entries = (Path(entry.name) for entry in files(package).iterdir())
    return sorted(entry.stem for entry in entries if entry.suffix == ".toml")


def read_toml(name: str, package: str, what: str, asked: str) -> Tree:
    """The file of a name that comes with a package, or of a path that ends in .toml; `asked` is who wants it."""
    shipped = shipped_in(package)
    if name not in shipped and not name.endswith(".toml"):
        near, many = get_close_matches(name, shipped, 1), "studies" if what == "study" else f"{what}s"
        advice = f"did you mean {near[0]!r}?" if near else f"the shipped {many} are {', '.join(shipped)}"
        raise TcmError(f"{asked} does not exist; {advice} (your own {what} is a file that ends in .toml)")
    try:
        own = name.endswith(".toml")
        content = read_regular(name) if own else (files(package) / f"{name}.toml").read_bytes()
        tree = tomllib.loads(content.decode("utf-8"))
    except TcmError:
        raise
    except UnicodeDecodeError as error:
        raise TcmError(f"{name} is not UTF-8 text; save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise TcmError(f"{name} is not valid TOML: {error}; correct it there") from error
    except OSError as error:
        raise TcmError(f"{asked} cannot be read ({error.strerror}); check the path") from error
    inside: list[object] = [tree]
    for _ in range(DEEPEST):
        inside = [value for table in inside for value in _values(table)]
    if inside:
        raise TcmError(f"{name} has tables within tables, more than {DEEPEST} deep; correct it there")
    return tree


def _values(table: object) -> Iterable[object]:
    return table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()


def read_extended(
    name: str, package: str, what: str, written_out: Callable[[Tree, str], Tree], children: tuple[str, ...] = ()
) -> Tree:
    """The file of a name with those that it `extends` merged in; `children` are those that led here.

    `written_out` replaces the short forms of the merged tables, given the file's name.
    """
    if name in children:
        raise TcmError(f"{children[-1]}: extends={name!r} is circular; remove one `extends`")
    asked = f"{children[-1]}: extends={name!r}" if children else f"{what} {name!r}"
    tree = read_toml(name, package, what, asked)
    tree.setdefault("name", Path(name).name.removesuffix(".toml"))
    base = tree.pop("extends", None)
    if base is None:
        return written_out(tree, name)
    if not isinstance(base, str):
        raise TcmError(f"{name}: extends={base!r} must be the name of a {what} or a .toml file")
    if base.endswith(".toml"):
        base = normpath(Path(name).parent / base)
    return written_out(merge(read_extended(base, package, what, written_out, (*children, name)), tree), name)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """`over` merged into `base`, table by table; a table of another kind or objective replaces the old one."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and _same_kind(before, value):
            merged[key] = merge(before, value)
        else:
            merged[key] = value
    return merged


def _same_kind(base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return all(over.get(tag, base.get(tag)) == base.get(tag) for tag in TAGS)


def tables_to_toml(keys: Tree, tables: Tree) -> str:
    """A file's own keys and its tables, by their headers, as TOML."""
    lines = [_line(key, value) for key, value in keys.items()]
    for header, table in tables.items():
        lines += ["", f"[{header}]", *(_line(key, value) for key, value in tags_first(table))]
    return "\n".join(lines) + "\n"


def with_nulls(value: object) -> object:
    """ "none" as the null that TOML does not have."""
    match value:
        case dict():
            return {key: with_nulls(item) for key, item in value.items()}
        case list():
            return [with_nulls(item) for item in value]
    return None if value == UNSET else value


def _line(key: str, value: object) -> str:
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", key)
    return f"{key if bare else toml_value(key)} = {toml_value(value)}"


def toml_value(value: object) -> str:
    """A value as TOML; None is "none".

    >>> toml_value({"kind": "constant", "decay": 0.999})
    '{ kind = "constant", decay = 0.999 }'
    """
    match value:
        case None:
            return f'"{UNSET}"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case BaseModel():
            return toml_value(value.model_dump())
        case Mapping():
            return "{ " + ", ".join(_line(key, item) for key, item in tags_first(value)) + " }"
        case Sequence():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        return toml_value(asdict(value))
    raise AssertionError(f"a recipe cannot hold a {type(value).__name__}")


def tags_first(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A table's keys, those first that decide which others there are."""
    return sorted(table.items(), key=lambda item: item[0] not in TAGS)
