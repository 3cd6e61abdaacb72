"""What a user can fix: the field, the value, the remedy."""


class TcmError(ValueError):
    """An error that the user can mend; the command line prints it as one line and exits with code 2.

    >>> raise TcmError("times[1]=0.821 lies below t'=1.0, where this model is undefined; use a time of at least 1.0")
    Traceback (most recent call last):
    ...
    tcm.errors.TcmError: times[1]=0.821 lies below t'=1.0, where this model is undefined; use a time of at least 1.0
    """


class TcmWarning(UserWarning):
    """Something works but is probably not what the user wants; the message says what to do."""
