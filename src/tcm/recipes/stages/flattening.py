"""When a stage has learned to denoise at a time: the rule by which a run ends stage 1 and chooses t'."""

from collections.abc import Mapping, Sequence

Curve = Sequence[tuple[int, float]]
"""A distance over the steps of a stage: (step, distance), in order."""
Curves = Mapping[float, Curve]
"""The curve of each time that is watched."""

FALL = 0.1
LOOK_BACK = 2 / 3


def is_flat(curve: Curve) -> bool:
    """Whether the distance fell by less than 10 % over the last third of the steps so far.

    It is compared with the newest one measured in the first two thirds; a curve without one is not flat.

    >>> is_flat([(100, 5.0), (200, 2.0), (300, 1.9)]), is_flat([(100, 5.0), (200, 2.0), (300, 1.5)])
    (True, False)
    """
    if not curve:
        return False
    step, distance = curve[-1]
    before = [earlier for earlier_step, earlier in curve if earlier_step <= LOOK_BACK * step]
    return bool(before) and distance > (1 - FALL) * before[-1]
