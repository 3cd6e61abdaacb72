"""Numbers as a person reads them: parameters, steps, hours."""


def millions(count: int) -> str:
    """A number of parameters.

    >>> millions(1_119_276_709), millions(247_489)
    ('1119.3 M', '0.25 M')
    """
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e6:.2f} M"


def thousands(count: int) -> str:
    """A number of steps.

    >>> thousands(250_000), thousands(1_200), thousands(900)
    ('250K', '1.2K', '900')
    """
    return f"{count / 1000:g}K" if count >= 1000 else str(count)


def amount(hours: float) -> str:
    """A predicted number of hours, to two digits.

    >>> amount(0.0001), amount(0.01234), amount(1234.5)
    ('<0.01', '0.012', '1,200')
    """
    if hours < 0.01:
        return "<0.01"
    return f"{float(f'{hours:.2g}'):,.0f}" if hours >= 10 else f"{hours:.2g}"


def evaluations(gradient: float, tangent: float, plain: float) -> str:
    """How often a network is evaluated for each image of a step.

    >>> evaluations(1, 0.75, 0.25)
    '1+0.75+0.25'
    """
    return f"{gradient:g}+{tangent:g}+{plain:g}"
