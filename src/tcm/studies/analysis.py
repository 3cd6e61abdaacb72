"""What the values of several seeds say: means, paired differences, and whether a claim held."""

from collections.abc import Mapping, Sequence, Set
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
FROM_WORST: tuple[Outcome, ...] = ("contradicted", "not measured", "not seen", "leaned that way", "held")
MOST = 0.8
"""The share of seeds that must agree for results to lean towards a claim."""


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
class Column:
    """A variant's values of one measurement, and the training seeds with which it diverged, which have none."""

    values: Values
    diverged: Set[int] = frozenset()


@dataclass(frozen=True)
class Comparison:
    """A variant that should be better against another.

    `gain` is the difference in favour of the first, `beyond` what is left of it above the gain that was `asked` for,
    which is a mean over seeds as well. Seeds with which only one of the two diverged are counted instead of compared.
    """

    other: str
    gain: Difference | None
    beyond: Difference | None
    asked: float = 0.0
    diverged: int = 0
    other_diverged: int = 0

    @property
    def outcome(self) -> Outcome:
        """Whether it is better: in the mean with the whole interval, or with most seeds only."""
        beyond = self.beyond
        if beyond is not None and beyond.certain and beyond.mean < 0:
            return "contradicted"
        if self.diverged or (beyond is not None and beyond.mean <= 0):
            return "not seen"
        if beyond is None:
            return "held" if self.other_diverged > 1 else "leaned that way" if self.other_diverged else "not measured"
        if beyond.certain:
            return "held"
        most = beyond.count > 1 and beyond.agreeing >= MOST * beyond.count
        return "leaned that way" if most else "not seen"


@dataclass(frozen=True)
class Verdict:
    """Whether a claim held: as far as the part of it that fared worst."""

    comparisons: tuple[Comparison, ...]

    @property
    def outcome(self) -> Outcome:
        outcomes = [comparison.outcome for comparison in self.comparisons]
        return next((outcome for outcome in FROM_WORST if outcome in outcomes), "not measured")


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


def compare(name: str, better: Column, other: Column, lower_is_better: bool = True, margin: float = 0.0) -> Comparison:
    """Whether a variant is better than another, called `name`, by `margin` of the other's value with the same seed.

    A margin of 0.15 asks for 15 % more than the other has, one of -0.05 allows 5 % less. It is taken seed by seed,
    because the other's mean is an estimate too.

    >>> compare("b", Column({0: 1.0, 1: 1.1, 2: 1.2}), Column({0: 2.0, 1: 2.1, 2: 2.3})).outcome
    'held'
    """
    sign = -1 if lower_is_better else 1
    shared = [seed for seed in better.values if seed in other.values]
    asked = {seed: margin * abs(other.values[seed]) for seed in shared}
    gains = {seed: sign * (better.values[seed] - other.values[seed]) for seed in shared}
    return Comparison(
        name,
        difference(gains, dict.fromkeys(gains, 0.0)),
        difference(gains, asked),
        float(np.mean(list(asked.values()))) if asked else 0.0,
        diverged=len(better.diverged - other.diverged),
        other_diverged=len(other.diverged & better.values.keys()),
    )


def spikes(norms: Sequence[float], largest: Sequence[float]) -> list[int]:
    """Where the gradient norm spikes: the lines whose largest norm exceeds three times the usual one around them.

    >>> spikes([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 9.0, 1.0, 1.0])
    [2]
    """
    half = AROUND // 2
    usual = [float(np.median(norms[max(0, i - half) : i + half + 1])) for i in range(len(norms))]
    return [i for i, one in enumerate(largest) if not one <= SPIKE * usual[i]]
