"""Overrides that reach further than one key: those for several stages, and a warm-up that fits a shortened stage."""

import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.plugins import Trust
from tcm.recipes.stages import stage_class


def for_each_stage(overrides: Sequence[str], stages: Mapping[str, Any], trust: Trust = False) -> list[str]:
    """`*.steps=500` once for each stage that has the key; what is given for a single stage takes precedence.

    >>> digits = {"first": {"objective": "diffusion"}, "second": {"objective": "truncated"}}
    >>> for_each_stage(["*.steps=500", "second.steps=100", "*.t_prime=0.5"], digits)
    ['second.steps=100', 'first.steps=500', 'second.t_prime=0.5']
    """
    single = [override for override in overrides if not _is_pattern(override)]
    given = set(map(key_of, single))
    found = []
    for override in filter(_is_pattern, overrides):
        pattern, _, rest = override.partition(".")
        key = rest.partition("=")[0].strip()
        own = key.partition(".")[0]
        meant = {name: stage for name, stage in stages.items() if fnmatchcase(name, pattern)}
        if not meant:
            raise TcmError(f"override {override!r}: no stage is called {pattern!r}; the stages are {', '.join(stages)}")
        having = [name for name, stage in meant.items() if own in _keys(stage, trust)]
        if not having:
            known = {known for stage in meant.values() for known in _keys(stage, trust)}
            near = get_close_matches(own, known, 1)
            advice = f"did you mean '{pattern}.{near[0]}'?" if near else "see `tcm recipes show NAME` for the keys"
            raise TcmError(f"override {override!r}: no stage has the key {own!r}; {advice}")
        found += [f"{name}.{rest}" for name in having if f"{name}.{key}" not in given]
    return single + found


def key_of(override: str) -> str:
    """What an override changes.

    >>> key_of("stages.truncated.t_prime = 1.5")
    'truncated.t_prime'
    """
    return override.partition("=")[0].strip().removeprefix("stages.")


def _is_pattern(override: str) -> bool:
    return "*" in override.partition("=")[0].partition(".")[0]


def _keys(stage: Any, trust: Trust) -> Mapping[str, object]:
    """The keys that a stage can have; none if it is not a valid one, which the recipe's own checks report."""
    try:
        return stage_class(str(stage["objective"]), trust).model_fields
    except (TcmError, KeyError, TypeError):
        return {}


def shortened_warmups(stages: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Overrides for the stages whose given `steps` leave no room for the recipe's warm-up: a tenth of the steps.

    A warm-up that is given itself stays as it is.
    """
    found = {}
    for name, keys in given.items():
        steps, warmup = (_number(table, key) for table, key in ((keys, "steps"), (stages.get(name), "warmup")))
        if steps is None or warmup is None or warmup < steps or "warmup" in keys:
            continue
        found[name] = {"warmup": max(steps, 0) // 10}
        warnings.warn(
            f"{name}.warmup={warmup} is too long for steps={steps}; it is now {found[name]['warmup']}",
            TcmWarning,
            stacklevel=3,
        )
    return found


def _number(table: Any, key: str) -> int | None:
    value = table.get(key) if isinstance(table, Mapping) else None
    return value if type(value) is int else None
