"""What a user can fix: the field, the value, the remedy."""

import re
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError


class TcmError(ValueError):
    """An error that the user can fix; the command line prints it as one line and exits with code 2.

    >>> raise TcmError("times[1]=0.821 is below t'=1.0; use a time of at least 1.0")
    Traceback (most recent call last):
    ...
    tcm.foundation.errors.TcmError: times[1]=0.821 is below t'=1.0; use a time of at least 1.0
    """


class Diverged(TcmError):
    """A model whose numbers have run away, in training or in sampling."""


class KeyInTable(TcmError):
    """An error whose text begins with a key of a table; `describe_validation` puts the table's own key before it."""


class TcmWarning(UserWarning):
    """Something works but is probably not what the user wants; the message says what to do."""


def describe_validation(error: ValidationError, source: str, model: type | None = None) -> TcmError:
    """The first of a validation's errors as one line: the key, the value, what to do.

    With the validated `model`, the key is named as the user wrote it, and for a misspelt one the nearest known key is
    suggested.
    """
    return TcmError(f"{source}: {describe_first(error, model)[1]}")


def describe_first(error: ValidationError, model: type | None = None) -> tuple[str, str]:
    """The key of the first error, and that line, which begins with it; an error of the whole table has no key."""
    errors = error.errors()
    # A misspelt key is often missed under its right name too: the misspelling is what helps.
    unknown = ("extra_forbidden", "unexpected_keyword_argument")
    first = next((one for one in errors if one["type"] in unknown), errors[0])
    parts, siblings = _walk(model, first["loc"])
    # A stage's key is named as on the command line.
    key = "".join(parts[1:] if parts[:1] == [".stages"] and len(parts) > 1 else parts).removeprefix(".")
    value = first["input"]
    match first["type"]:
        case "json_invalid":
            problem = first["msg"]
        case "extra_forbidden" | "unexpected_keyword_argument":
            near = get_close_matches(str(first["loc"][-1]), siblings, 1, cutoff=0.75)
            advice = f"did you mean {near[0]!r}?" if near else "remove it or correct its spelling"
            problem = f"{key} is not a known key; {advice}"
        case "missing":
            problem = f"{key} is missing; add it"
        case "union_tag_not_found" | "union_tag_invalid":
            problem = _describe_tag(key, value, first["ctx"])
        case _ if value is None:
            problem = f"{key} cannot be unset; give it a value"
        case "model_type" | "model_attributes_type" | "dict_type" | "dataclass_type":
            problem = f"{key}={value!r:.200} must be a table of keys"
        case "tuple_type":
            problem = f"{key}={value!r:.200} must be a list, in brackets"
        case "string_type":
            problem = f'{key}={value!r:.200} must be text; put it in quotes: "{value}"'
        case "int_type" if isinstance(value, float) and value.is_integer():
            problem = f"{key}={value!r:.200} must be an integer; write {int(value)}"
        case "value_error":
            problem = _describe_value_error(key, value, first["ctx"]["error"])
        case _:
            problem = f"{key}={value!r:.200} {_MUST.sub('must', first['msg']).replace(' after validation', '')}"
    return key, problem


def _describe_value_error(key: str, value: object, error: Exception) -> str:
    if isinstance(error, KeyInTable):
        return f"{key}.{error}"
    if isinstance(value, dict):
        return f"{key}: {error}" if key else str(error)
    return f"{key}={value!r:.200}: {error}"


_MUST = re.compile(r"^\w+ should(?= )")


def _describe_tag(key: str, given: dict[str, Any], context: dict[str, Any]) -> str:
    tag = context["discriminator"].strip("'")
    expected = context.get("expected_tags")
    return f"{key}.{tag}={given[tag]!r} must be one of {expected}" if expected else f"{key}.{tag} is missing; add it"


def _walk(model: type | None, loc: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """A pydantic location as it is written, without the tags of unions, and the keys that exist next to the last."""
    parts: list[str] = []
    siblings: list[str] = []
    here: Any = model
    for part in loc:
        here = _unwrapped(here)
        if keys := _keys(here):
            siblings = list(keys)
            here = keys.get(str(part))
        elif get_origin(here) in (dict, tuple):
            here = get_args(here)[-1] if get_origin(here) is dict else get_args(here)[0]
        elif any(_has_tag(choice, part) for choice in get_args(here)):
            here = next(choice for choice in get_args(here) if _has_tag(choice, part))
            continue
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    return parts, siblings


def _unwrapped(annotation: Any) -> Any:
    """The type itself, without Annotated and None."""
    if get_origin(annotation) is Annotated:
        return _unwrapped(get_args(annotation)[0])
    choices = [choice for choice in get_args(annotation) if choice is not NoneType]
    return _unwrapped(choices[0]) if len(choices) == 1 and NoneType in get_args(annotation) else annotation


def _has_tag(choice: Any, tag: int | str) -> bool:
    return any(get_args(annotation) == (tag,) for annotation in _keys(choice).values())


def _keys(annotation: Any) -> dict[str, Any]:
    """The keys of a table and their types; none if it is not a table of known keys."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    return get_type_hints(annotation) if isinstance(annotation, type) and is_dataclass(annotation) else {}


def last_line(error: str) -> str:
    """What an error says: of a traceback the end.

    >>> last_line("Traceback …\\n  File …\\nMemoryError: no memory\\n")
    'MemoryError: no memory'
    """
    return error.strip().rpartition("\n")[2]
