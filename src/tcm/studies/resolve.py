"""From a study's name or file to the study, its variants, and back to TOML."""

import json
from collections import Counter
from datetime import date, time
from difflib import get_close_matches
from itertools import product
from os.path import normpath
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tcm.foundation.errors import TcmError, describe_validation
from tcm.foundation.plugins import Trust
from tcm.recipes.overrides import key_of
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import Recipe
from tcm.recipes.tables import Tree, read_extended, shipped_in, tables_to_toml, toml_value, with_nulls
from tcm.studies.schema import Study, Variant, VariantSpec

PACKAGE = "tcm.studies"


def shipped_studies() -> list[str]:
    """The names of the studies that come with the package.

    >>> "t-prime" in shipped_studies()
    True
    """
    return shipped_in(PACKAGE)


def resolve_study(name_or_path: str | Path, *, trust: Trust = True) -> Study:
    """The study of a shipped name or a .toml file; modules are trusted as in a recipe.

    >>> resolve_study("t-prime").base
    'digits'
    """
    source = str(name_or_path)
    tree = read_extended(source, PACKAGE, "study", _written_out)
    try:
        return Study.model_validate_json(json.dumps(with_nulls(tree), default=str), strict=True, context=trust)
    except ValidationError as error:
        raise describe_validation(error, source, Study) from error


def study_to_toml(study: Study) -> str:
    """A study as TOML with every default written out; an optional key that is not set is "none"."""
    tree = study.model_dump()
    tables = {key: tree.pop(key) for key in list(tree) if isinstance(tree[key], dict)}
    return tables_to_toml(tree, tables)


def variants_of(study: Study, seed: int, *, trust: Trust = True) -> list[Variant]:
    """The variants of a study with one seed, each with its recipe.

    >>> [variant.slug for variant in variants_of(resolve_study("t-prime"), seed=0)][:2]
    ['t-0.17', 't-0.8']
    """
    variants = [_variant(study, name, spec, seed, trust) for name, spec in study.variants.items()]
    known = dict.fromkeys(stage for variant in variants for stage in variant.recipe.stages)
    for stage in study.measure.curve:
        if stage not in known:
            raise TcmError(f"{study.name}: measure.curve={stage!r} is not a stage; use one of: {', '.join(known)}")
    t_max = max(variant.recipe.t_max for variant in variants)
    for t in study.measure.dfid:
        if t > t_max:
            raise TcmError(f"{study.name}: measure.dfid={t:g} lies above t_max={t_max:g}; use lower times")
    return variants


def _variant(study: Study, name: str, spec: VariantSpec, seed: int, trust: Trust) -> Variant:
    given = {key_of(override) for override in spec.overrides}
    if "seed" in given | {key_of(override) for override in study.overrides}:
        raise TcmError(f"{study.name}, variant {name!r}: seed cannot be overridden; give the study's seeds")
    shared = [override for override in study.overrides if key_of(override) not in given]
    try:
        recipe = resolve(study.base, [*shared, *spec.overrides, f"seed={seed}"], trust=trust)
    except TcmError as error:
        raise TcmError(f"{study.name}, variant {name!r}: {error}") from error
    stage = spec.stage or last_stage(recipe)
    if stage not in recipe.stages:
        near = get_close_matches(stage, recipe.stages, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(recipe.stages)}"
        raise TcmError(f"{study.name}: variants.{name!r}.stage={stage!r} is not a stage of {study.base}; {advice}")
    return Variant(name, recipe, stage)


def last_stage(recipe: Recipe) -> str:
    """The stage whose model is a run's result: the last that is not a baseline."""
    results = [name for name, stage in recipe.stages.items() if not stage.baseline]
    return (results or list(recipe.stages))[-1]


def _written_out(tree: Tree, source: str) -> Tree:
    """The base's whole path, the variants of a grid, the overrides that a mere list is, a single expectation."""
    tree = _with_grid(tree, source)
    if isinstance(tree.get("expects"), dict):
        tree = tree | {"expects": [tree["expects"]]}
    base, variants = tree.get("base"), tree.get("variants")
    if isinstance(base, str) and base.endswith(".toml"):
        tree = tree | {"base": normpath(Path(source).absolute().parent / base)}
    if not isinstance(variants, dict):
        return tree
    for name, given in variants.items():
        if isinstance(given, str):
            raise TcmError(f"{source}: variants.{name!r}={given!r} must be a list of overrides; write [{given!r}]")
    tables = {name: {"overrides": given} if isinstance(given, list) else given for name, given in variants.items()}
    return tree | {"variants": tables}


def _with_grid(tree: Tree, source: str) -> Tree:
    """The study's tables, with `[grid]` as the variants that it stands for."""
    if "grid" not in tree:
        return tree
    if "variants" in tree:
        raise TcmError(
            f"{source}: grid and variants cannot both be given; give one of them (a study that this one extends counts)"
        )
    grid = tree["grid"]
    if not isinstance(grid, dict) or not grid:
        raise TcmError(f'{source}: grid={grid!r} must be a table such as "truncated.rho" = [0.1, 0.25]')
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise TcmError(
                f"{source}: grid.{key}={values!r} must be a list of values; write the key in quotes, such as "
                '"truncated.rho" = [0.1, 0.25]'
            )
        for value in values:
            if isinstance(value, date | time):
                raise TcmError(f"{source}: grid.{key}: no key of a recipe takes a date such as {value}; remove it")
            if values.count(value) > 1:
                raise TcmError(f"{source}: grid.{key}: {value!r} is given twice; give it once")
    rest = {key: value for key, value in tree.items() if key != "grid"}
    return rest | {"variants": _grid_variants(grid)}


def _grid_variants(grid: dict[str, list[Any]]) -> Tree:
    """One variant for each combination, named by the last part of each key where that is unique."""
    endings = Counter(key.rpartition(".")[2] for key in grid)
    shown = {key: ending if endings[ending := key.rpartition(".")[2]] == 1 else key for key in grid}
    variants = {}
    for values in product(*grid.values()):
        texts = {key: toml_value(value) for key, value in zip(grid, values, strict=True)}
        name = ", ".join(f"{shown[key]} = {text}" for key, text in texts.items())
        variants[name] = [f"{key}={text}" for key, text in texts.items()]
    return variants
