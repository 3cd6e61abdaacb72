"""What a user can fix: the field, the value, the remedy."""

from pydantic import ValidationError


class TcmError(ValueError):
    """An error that the user can mend; the command line prints it as one line and exits with code 2.

    >>> raise TcmError("times[1]=0.821 lies below t'=1.0, where this model is undefined; use a time of at least 1.0")
    Traceback (most recent call last):
    ...
    tcm.errors.TcmError: times[1]=0.821 lies below t'=1.0, where this model is undefined; use a time of at least 1.0
    """


class TcmWarning(UserWarning):
    """Something works but is probably not what the user wants; the message says what to do."""


def describe_validation(error: ValidationError, source: str) -> TcmError:
    """The first of a validation's errors as one line: the key, the value, what is wrong with it."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "(the whole)"
    if first["type"] == "extra_forbidden":
        return TcmError(f"{source}: {key} is not a known key; remove it or correct its spelling")
    if first["type"] == "missing":
        return TcmError(f"{source}: {key} is missing; add it")
    message = first["msg"].removeprefix("Value error, ")
    return TcmError(f"{source}: {key}={first['input']!r}: {message}")
