"""Classes that people add from outside, found by Python's own means: an entry point or an import path."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeVar, cast

from tcm.foundation.errors import TcmError

Base = TypeVar("Base")


def find_class(key: str, name: str, ours: Mapping[str, type[Base]], base: type, group: str) -> type[Base]:
    """The class that `name`, the value of `key`, stands for.

    It is one of ours, an installed package's entry point in `group`, or `module:Class` of a module that Python can
    import: one from your Python path, never a file that came with a model or a recipe.
    """
    if name in ours:
        return ours[name]
    found: object = next((entry.load() for entry in entry_points(group=group, name=name)), None)
    if found is None and ":" in name:
        found = _imported(key, name)
    if found is None:
        near = get_close_matches(name, ours, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(ours)}"
        raise TcmError(f"{key}={name!r} is unknown; {advice} (a class of your own is named module:Class)")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TcmError(f"{key}={name!r} is not a subclass of {base.__name__}; name one that is")
    return cast(type[Base], found)


def _imported(key: str, name: str) -> object:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TcmError(f"{key}={name!r} cannot be imported ({error}); put its module on the Python path") from error
