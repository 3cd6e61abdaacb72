"""What the values of several seeds say: means, paired differences, and whether a claim held."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

Values = Mapping[int, float]
"""A variant's values of one measurement, by training seed."""

CONFIDENCE = 0.95
SPIKE = 3.0
"""A gradient norm this many times the usual one around it is a spike."""
AROUND = 21
"""The usual norm is the median of this many lines of metrics."""

Outcome = Literal["held", "leaned that way", "not seen", "contradicted", "not measured"]


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over seeds, and the 95 % t-interval of the mean; None for a single seed."""

    count: int
    mean: float
    deviation: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Difference:
    """A paired difference over the seeds that both variants have; `agreeing` of them have the mean's sign."""

    count: int
    mean: float
    interval: tuple[float, float] | None
    agreeing: int

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True)
class Comparison:
    """The variant that should be better against another: their difference in favour of the first is positive."""

    other: str
    gain: Difference | None


@dataclass(frozen=True)
class Verdict:
    """Whether a claim held, with the comparisons that decide it."""

    outcome: Outcome
    comparisons: tuple[Comparison, ...]


def summarise(values: Sequence[float]) -> Summary | None:
    """The summary of one value per seed; None if there is none.

    >>> summarise([1.0, 2.0, 3.0]).mean
    2.0
    """
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) < 2:
        return Summary(len(values), mean, None, None)
    deviation = float(np.std(values, ddof=1))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * deviation / len(values) ** 0.5
    return Summary(len(values), mean, deviation, (mean - half, mean + half))


def difference(values: Values, reference: Values) -> Difference | None:
    """`values` minus `reference`, seed by seed; None if they share no seed.

    >>> difference({0: 1.0, 1: 2.0, 2: 9.0}, {0: 3.0, 1: 3.0}).mean
    -1.5
    """
    differences = [values[seed] - reference[seed] for seed in values if seed in reference]
    found = summarise(differences)
    if found is None:
        return None
    agreeing = sum(np.sign(one) == np.sign(found.mean) for one in differences)
    return Difference(found.count, found.mean, found.interval, int(agreeing))


def judge(better: Values, others: Mapping[str, Values], lower_is_better: bool = True) -> Verdict:
    """Whether a variant is better than each of some others.

    It held if every mean difference is in favour and its interval excludes 0; it leaned that way if some interval does
    not. It was contradicted if an interval excludes 0 on the other side, and not seen in all other cases.
    """
    sides = {name: (values, better) if lower_is_better else (better, values) for name, values in others.items()}
    comparisons = tuple(Comparison(name, difference(*pair)) for name, pair in sides.items())
    gains = [comparison.gain for comparison in comparisons if comparison.gain is not None]
    outcome: Outcome
    if any(gain.certain and gain.mean < 0 for gain in gains):
        outcome = "contradicted"
    elif len(gains) < len(comparisons) or not comparisons:
        outcome = "not measured"
    elif any(gain.mean <= 0 for gain in gains):
        outcome = "not seen"
    else:
        outcome = "held" if all(gain.certain for gain in gains) else "leaned that way"
    return Verdict(outcome, comparisons)


def spikes(norms: Sequence[float], largest: Sequence[float]) -> list[int]:
    """Where the gradient norm spikes: the lines whose largest norm exceeds three times the usual one around them.

    >>> spikes([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 9.0, 1.0, 1.0])
    [2]
    """
    half = AROUND // 2
    usual = [float(np.median(norms[max(0, i - half) : i + half + 1])) for i in range(len(norms))]
    return [i for i, one in enumerate(largest) if not one <= SPIKE * usual[i]]
