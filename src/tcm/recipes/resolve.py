"""From a name, a file and overrides to a recipe, and back to TOML."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tcm.foundation.errors import TcmError, describe_validation
from tcm.foundation.plugins import Trust
from tcm.recipes.overrides import for_each_stage, shortened_warmups
from tcm.recipes.schema import Recipe
from tcm.recipes.stages.base import AUTO, CONTINUE, UNTIL_FLAT
from tcm.recipes.tables import (
    UNSET,
    Tree,
    merge,
    read_extended,
    shipped_in,
    tables_to_toml,
    tags_first,
    toml_value,
    with_nulls,
)
from tcm.weights import RECIPE_FILE

PACKAGE = "tcm.recipes"


def shipped() -> list[str]:
    """The names of the recipes that come with the package.

    >>> "digits" in shipped()
    True
    """
    return shipped_in(PACKAGE)


def resolve(name_or_path: str, overrides: Sequence[str] = (), *, trust: Trust = True) -> Recipe:
    """The recipe of a shipped name or a .toml file, with overrides such as `truncated.t_prime=1.5`;
    `*.batch=16` is for all stages, `halving-*.batch=16` for those of this name: the rounds of a stage `halving`.

    Modules that it names are imported because the user named the recipe; a file that the user did not name is not to be
    trusted with that.

    >>> resolve("cifar10", ["consistency.steps=1000", "seed=3"]).stages["consistency"].steps
    1000
    """
    source = str(name_or_path)
    tree = _in_rounds(read_extended(source, PACKAGE, "recipe", _in_order), source)
    given = _override_tree(for_each_stage(overrides, _stages(tree), trust), tree)
    if shortened := shortened_warmups(_stages(tree), _stages(given)):
        given = merge(given, {"stages": shortened})
    return recipe_of(_in_order(merge(tree, given), "overrides"), source, trust)


def noted_recipe(folder: Path) -> Recipe:
    """The recipe that a run's folder holds, which may be a stranger's."""
    return resolve(str(folder / RECIPE_FILE), trust=False)


def recipe_of(tree: Tree, source: str, trust: Trust = False) -> Recipe:
    """The recipe that tables of TOML describe; `source` names them in errors."""
    try:
        # JSON's strictness is the right one for TOML: a list may become a tuple, but text never a number.
        return Recipe.model_validate_json(json.dumps(with_nulls(tree), default=str), strict=True, context=trust)
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


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tags_first(table):
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", toml_value(value)


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
        return {f"{name}-{number}": merge(shared, own) for number, own in enumerate(rounds, 1)}
    raise TcmError(
        f"{source}: {name}.rounds={rounds!r} must be a list with a table of its own keys for each round, such as "
        "[{ steps = 500 }, {}]"
    )
