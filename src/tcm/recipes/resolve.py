"""From a name, a file and overrides to a recipe, and back to TOML."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from importlib.resources import files
from os.path import normpath
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from tcm.foundation.errors import TcmError, describe_validation
from tcm.recipes.overrides import for_each_stage, shortened_warmups
from tcm.recipes.schema import Recipe
from tcm.recipes.stages.base import AUTO, CONTINUE, UNTIL_FLAT

Tree = dict[str, Any]

UNSET = "none"
"""How TOML, which has no null, says that an optional key is not set."""

TAGS = ("objective", "kind")
"""Keys that decide which other keys a table has."""


def shipped() -> list[str]:
    """The names of the recipes that come with the package.

    >>> "digits" in shipped()
    True
    """
    entries = (Path(entry.name) for entry in files("tcm.recipes").iterdir())
    return sorted(entry.stem for entry in entries if entry.suffix == ".toml")


def resolve(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a shipped name or a .toml file, with overrides such as `truncated.t_prime=1.5`;
    `*.batch=16` is for all stages, `halving-*.batch=16` for those of this name: the rounds of a stage `halving`.

    >>> resolve("cifar10", ["consistency.steps=1000", "seed=3"]).stages["consistency"].steps
    1000
    """
    tree = _in_rounds(_load(str(name_or_path), ()), str(name_or_path))
    given = _override_tree(for_each_stage(overrides, _stages(tree)), tree)
    if shortened := shortened_warmups(_stages(tree), _stages(given)):
        given = _merge(given, {"stages": shortened})
    return recipe_of(_in_order(_merge(tree, given), "overrides"), str(name_or_path))


def recipe_of(tree: Tree, source: str) -> Recipe:
    """The recipe that tables of TOML describe; `source` names them in errors."""
    try:
        # JSON's strictness is the right one for TOML: a list may become a tuple, but text never a number.
        return Recipe.model_validate_json(json.dumps(with_nulls(tree), default=str), strict=True)
    except ValidationError as error:
        raise describe_validation(error, source, Recipe) from error


def to_toml(recipe: Recipe) -> str:
    """A recipe as TOML with every default written out; an optional key that is not set is "none"."""
    return tree_to_toml(recipe.model_dump())


def tree_to_toml(tree: Tree) -> str:
    """Tables of a recipe as TOML, each stage in a table of its own."""
    tree = dict(tree)
    stages = tree.pop("stages")
    tables = {key: tree.pop(key) for key in [key for key, value in tree.items() if isinstance(value, dict)]}
    return tables_to_toml(tree, tables | {f"stages.{name}": stage for name, stage in stages.items()})


def tables_to_toml(keys: Tree, tables: Tree) -> str:
    """A file's own keys and its tables, by their headers, as TOML."""
    lines = [_line(key, value) for key, value in keys.items()]
    for header, table in tables.items():
        lines += ["", f"[{header}]", *(_line(key, value) for key, value in _tags_first(table))]
    return "\n".join(lines) + "\n"


def differences(a: Recipe, b: Recipe) -> list[str]:
    """Each key in which two recipes differ, with both values.

    >>> differences(resolve("cifar10"), resolve("cifar10", ["truncated.t_prime=0.5"]))
    ['truncated.t_prime: 1.0 → 0.5']
    """
    found = [] if list(a.stages) == list(b.stages) else [f"stages: {', '.join(a.stages)} → {', '.join(b.stages)}"]
    common = a.stages.keys() & b.stages.keys()
    first, second = (dict(_flat(_by_stage(recipe, common))) for recipe in (a, b))
    for key in first | second:
        if first.get(key, "absent") != second.get(key, "absent"):
            found.append(f"{key}: {first.get(key, 'absent')} → {second.get(key, 'absent')}")
    return found


def _by_stage(recipe: Recipe, names: Set[str]) -> Tree:
    tree = recipe.model_dump()
    return tree | {name: stage for name, stage in tree.pop("stages").items() if name in names}


def _tags_first(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(table.items(), key=lambda item: item[0] not in TAGS)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in _tags_first(table):
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", toml_value(value)


def _load(name: str, children: tuple[str, ...]) -> Tree:
    """The table of a recipe with those that it extends merged in; `children` are those that led here."""
    if name in children:
        raise TcmError(f"{children[-1]}: extends={name!r} is circular; remove one `extends`")
    tree = _read(name, children)
    tree.setdefault("name", Path(name).name.removesuffix(".toml"))
    base = tree.pop("extends", None)
    if base is None:
        return _in_order(tree, name)
    if not isinstance(base, str):
        raise TcmError(f"{name}: extends={base!r} must be the name of a recipe or a .toml file")
    if base.endswith(".toml"):
        base = normpath(Path(name).parent / base)
    return _in_order(_merge(_load(base, (*children, name)), tree), name)


def _read(name: str, children: tuple[str, ...]) -> Tree:
    asked = f"{children[-1]}: extends={name!r}" if children else f"recipe {name!r}"
    if name not in shipped() and not name.endswith(".toml"):
        near = get_close_matches(name, shipped(), 1)
        advice = f"did you mean {near[0]!r}?" if near else f"the shipped recipes are {', '.join(shipped())}"
        raise TcmError(f"{asked} does not exist; {advice} (your own recipe is a file that ends in .toml)")
    try:
        source = Path(name) if name.endswith(".toml") else files("tcm.recipes") / f"{name}.toml"
        return tomllib.loads(source.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TcmError(f"{name} is not valid TOML: {error}; correct it there") from error
    except UnicodeDecodeError as error:
        raise TcmError(f"{name} is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise TcmError(f"{asked} cannot be read ({error.strerror}); check the path") from error


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """`over` merged into `base`, table by table; a table of another kind or objective replaces the old one."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and _same_kind(before, value):
            merged[key] = _merge(before, value)
        else:
            merged[key] = value
    return merged


def _same_kind(base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return all(over.get(tag, base.get(tag)) == base.get(tag) for tag in TAGS)


def _override_tree(overrides: Sequence[str], tree: Tree) -> Tree:
    """`truncated.t_prime=1.5` as {"stages": {"truncated": {"t_prime": 1.5}}}."""
    result: Tree = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise TcmError(f"override {override!r} is not of the form key=value; write it like truncated.t_prime=1.5")
        table = result
        *parents, last = _full_key(key.strip(), tree)
        for part in parents:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise TcmError(f"override {override!r} contradicts another override; give one of the two")
        if last in table:
            raise TcmError(f"override {override!r} is given twice or contradicts another one; give it once")
        table[last] = _value(text.strip(), _present(tree, [*parents, last]))
    return result


def _present(tree: object, keys: list[str]) -> object:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _full_key(key: str, tree: Tree) -> list[str]:
    parts = key.split(".")
    stages = _stages(tree)
    if parts[0] in stages:
        return ["stages", *parts]
    known = [*Recipe.model_fields, "order"]
    if parts[0] in known:
        return parts
    near = get_close_matches(parts[0], [*known, *stages], 1)
    inside = [name for name, stage in stages.items() if isinstance(stage, Mapping) and parts[0] in stage]
    if inside:
        advice = f"did you mean {f'{inside[-1]}.{key}'!r}?"
    elif near:
        advice = f"did you mean {'.'.join([near[0], *parts[1:]])!r}?"
    else:
        advice = f"the stages are {', '.join(stages)}"
    raise TcmError(f"override {key!r}: {parts[0]!r} is neither a key nor a stage of this recipe; {advice}")


def _stages(tree: Tree) -> Mapping[str, Any]:
    stages = tree.get("stages")
    return stages if isinstance(stages, Mapping) else {}


def _value(text: str, present: object) -> object:
    """TOML where it is TOML (numbers, true, lists, tables, quoted strings), else the text itself.

    What replaces text stays text: `data.path=2024` is a folder's name. Words that stand for a number do not count.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    replaces_text = isinstance(present, str) and present not in (UNSET, CONTINUE, UNTIL_FLAT, AUTO)
    return text if len(parsed) > 1 or (replaces_text and not isinstance(value, str)) else value


def _in_order(tree: Tree, source: str) -> Tree:
    """The table without `order`, its stages in that order; stages that it leaves out do not run."""
    if "order" not in tree:
        return tree
    order, stages = tree["order"], _stages(tree)
    listed = isinstance(order, list) and order and all(isinstance(name, str) for name in order)
    if not listed or len(set(order)) < len(order):
        raise TcmError(
            f"{source}: order={order!r} must be a list of stages, each once; the stages are {json.dumps(list(stages))}"
        )
    for name in order:
        if name not in stages:
            raise TcmError(f"{source}: order names the unknown stage {name!r}; the stages are {', '.join(stages)}")
    rest = {key: value for key, value in tree.items() if key != "order"}
    return rest | {"stages": {name: stages[name] for name in order}}


def _in_rounds(tree: Tree, source: str) -> Tree:
    """The table with each stage that has `rounds` as so many stages in a row, NAME-1, NAME-2, and so on."""
    stages: Tree = {}
    for name, table in _stages(tree).items():
        parts = _rounds(name, table, source) if isinstance(table, Mapping) else {name: table}
        if twice := stages.keys() & parts.keys():
            raise TcmError(f"{source}: there are two stages {min(twice)!r}, one of them a round; rename one")
        stages |= parts
    return tree | {"stages": stages} if stages else tree


def _rounds(name: str, table: Mapping[str, Any], source: str) -> Tree:
    rounds, shared = table.get("rounds", UNSET), {key: table[key] for key in table if key != "rounds"}
    if rounds == UNSET:
        return {name: shared}
    if isinstance(rounds, list) and rounds and all(isinstance(own, Mapping) for own in rounds):
        return {f"{name}-{number}": _merge(shared, own) for number, own in enumerate(rounds, 1)}
    raise TcmError(
        f"{source}: {name}.rounds={rounds!r} must be a list with a table of its own keys for each round, such as "
        "[{ steps = 500 }, {}]"
    )


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
            return "{ " + ", ".join(_line(key, item) for key, item in _tags_first(value)) + " }"
        case Sequence():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        return toml_value(asdict(value))
    raise AssertionError(f"a recipe cannot hold a {type(value).__name__}")
