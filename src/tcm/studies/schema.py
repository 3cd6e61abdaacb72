"""What a study is: a recipe, what varies, what is measured, and what the paper says about it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from tcm.data.opening import check_class
from tcm.evaluation.evaluate import Metric
from tcm.foundation.errors import TcmError
from tcm.recipes.schema import Recipe
from tcm.recipes.stages.optimization import Count, Positive, Spec

LONGEST_NAME = 200
"""Bytes of a variant's folder; file systems take 255."""
HIGHER_IS_BETTER = ("is", "precision", "recall")


@dataclass(frozen=True)
class Quantity:
    """What is measured of a model: a kind of score, of samples in so many steps or of denoising at t.

    Its text names it in a study's file.

    >>> str(Quantity("fid", steps=2)), str(Quantity("dfid", t=1.0))
    ('fid, 2 steps', 'dfid, t = 1')
    """

    kind: str
    steps: int | None = None
    t: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}, {self.how}" if self.how else self.kind

    @property
    def how(self) -> str:
        """The steps or the t in words; empty if it has neither."""
        if self.t is not None:
            return f"t = {self.t:g}"
        return "" if self.steps is None else f"{self.steps} step{'' if self.steps == 1 else 's'}"

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower value is better, as it is for all distances.

        >>> Quantity("fid", steps=1).lower_is_better, Quantity("recall", steps=1).lower_is_better
        (True, False)
        """
        return self.kind not in HIGHER_IS_BETTER


GRADIENTS = Quantity("gradient spikes")
"""What `gradients = true` measures."""


class VariantSpec(Spec):
    """A variant as a study's file describes it: changes to the base recipe, and whose model is measured."""

    overrides: tuple[str, ...] = ()
    stage: str | None = Field(default=None, description="the stage whose model is measured; not given: the last")


class Measure(Spec):
    """What is measured of each variant's model."""

    data: str | None = Field(default=None, description="what to compare with; not given: the recipe's data")
    detector: str = Field(default="digits", description="whose features are compared, as in `tcm eval`")
    metrics: tuple[Metric, ...] = Field(default=("fid",), description="as in `tcm eval`")
    count: int = Field(default=5000, ge=2, description="samples")
    reference_count: int | None = Field(default=None, ge=2, description="images of the data; not given: all")
    steps: tuple[Count, ...] = Field(default=(1, 2), description="sampling steps")
    dfid: tuple[Positive, ...] = Field(default=(), description="times at which denoising is measured")
    curve: tuple[str, ...] = Field(default=(), description="stages whose kept checkpoints are measured too")
    curve_count: int = Field(default=1000, ge=2, description="samples of each checkpoint")
    curve_detector: str | None = Field(
        default=None, description="whose features curves are measured in; not given: those of `detector`"
    )
    gradients: bool = Field(default=False, description="whether spikes of the gradient norm are counted")

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        if self.data is not None:
            check_class("data", self.data, info.context or False)
        for key in ("metrics", "steps", "dfid", "curve"):
            if twice := [value for value, count in Counter(getattr(self, key)).items() if count > 1]:
                raise TcmError(f"{key}: {twice[0]!r} is given twice; give it once")
        if not self.quantities:
            raise TcmError("nothing is measured; give metrics and steps, dfid, or gradients = true")
        return self

    @property
    def quantities(self) -> list[Quantity]:
        """All that is measured.

        >>> [str(quantity) for quantity in Measure(dfid=(0.2, 1.0)).quantities]
        ['fid, 1 step', 'fid, 2 steps', 'dfid, t = 0.2', 'dfid, t = 1']
        """
        kinds = [part for metric in self.metrics for part in metric_parts(metric)]
        sampled = [Quantity(kind, steps=steps) for kind in kinds for steps in self.steps]
        denoised = [Quantity("dfid", t=t) for t in self.dfid]
        return [*sampled, *denoised, *([GRADIENTS] if self.gradients else [])]


def metric_parts(metric: Metric) -> tuple[str, ...]:
    """The kinds of score that a metric gives: precision-recall gives two."""
    return ("precision", "recall") if metric == "precision-recall" else (metric,)


class Expects(Spec):
    """A part of what would make the claim hold here: a variant is better than each of some others, by a measurement."""

    better: str
    than: tuple[str, ...] = Field(min_length=1)
    by: str = Field(description='a measurement, such as "fid, 1 step" or "dfid, t = 1"')
    margin: float = Field(
        default=0.0, gt=-1, lt=1, description="0.15: at least 15 % better; -0.05: at most 5 % worse, which is no worse"
    )


class Paper(Spec):
    """The paper's own figures; "none" is a cell without one."""

    columns: tuple[str, ...] = Field(min_length=1)
    rows: dict[str, tuple[float | str | None, ...]]
    note: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, cells in self.rows.items():
            if len(cells) != len(self.columns):
                raise TcmError(
                    f'rows.{name!r} has {len(cells)} cells, but there are {len(self.columns)} columns; write "none" '
                    "for a cell that the paper leaves out"
                )
        return self


class Study(Spec):
    """Variants of one recipe, the seeds they are trained with, and what is measured of each.

    In a file, `[grid]` may take the place of `[variants]`, a variant may be just its list of overrides, and `[expects]`
    may be one table.
    """

    name: str = Field(min_length=1, description="not given in a file: the file's name")
    title: str
    question: str
    claim: str = Field(description="the paper's claim, in our words")
    where: str = Field(description="where the paper makes it")
    base: str = Field(description="a recipe's name, or a .toml file, relative to the study's own")
    overrides: tuple[str, ...] = Field(default=(), description="changes to the base recipe for all variants")
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    reference: str | None = Field(default=None, description="what variants are compared with; not given: the first")
    variants: dict[str, VariantSpec] = Field(min_length=1)
    measure: Measure = Measure()
    expects: tuple[Expects, ...] = Field(default=(), description="one table, or several: the claim holds if all do")
    paper: Paper | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_names(self.variants)
        _check_seeds(self.seeds)
        if self.reference is not None:
            self._check_variant("reference", self.reference)
        for expected in self.expects:
            self._check_variant("expects.better", expected.better)
            for name in expected.than:
                self._check_variant("expects.than", name)
            if expected.better in expected.than:
                raise TcmError(f"expects.than={expected.better!r} is the variant that should be better; remove it")
            self.quantity(expected.by)
        return self

    def _check_variant(self, key: str, name: str) -> None:
        if name not in self.variants:
            raise TcmError(f"{key}={name!r} is not a variant; use one of: {'; '.join(self.variants)}")

    def quantity(self, by: str) -> Quantity:
        """The measurement that `expects.by` names."""
        named = {str(quantity): quantity for quantity in self.measure.quantities}
        if by not in named:
            raise TcmError(f"expects.by={by!r} is not measured; use one of: {'; '.join(named)}")
        return named[by]

    @property
    def decisive(self) -> list[Quantity]:
        """The measurements that decide whether the claim holds."""
        return list(dict.fromkeys(self.quantity(expected.by) for expected in self.expects))

    @property
    def compared_with(self) -> str:
        """The variant that the others are compared with."""
        return next(iter(self.variants)) if self.reference is None else self.reference


@dataclass(frozen=True)
class Variant:
    """A variant with one seed, ready to be trained; `stage` is the one whose model is measured.

    A stage that several variants share is trained once, so its model has the `second_time` and the companion of
    only one of them: a measurement takes those of `recipe`.
    """

    name: str
    recipe: Recipe
    stage: str

    @property
    def seed(self) -> int:
        """The seed of all its randomness."""
        return self.recipe.seed

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return slug_of(self.name)

    def curves(self, study: Study) -> list[str]:
        """The stages of this variant whose course is measured."""
        return [name for name in study.measure.curve if name in self.recipe.stages]


def slug_of(name: str) -> str:
    """A variant's name as that of a folder.

    >>> slug_of("t' = 0.17"), slug_of("ρ = 0.1, w_b = 1.0")
    ('t-0.17', 'ρ-0.1-w_b-1.0')
    """
    return re.sub(r"[^\w.]+", "-", name.lower()).strip("-.")


def _check_names(variants: dict[str, Any]) -> None:
    slugs = Counter(slug_of(name) for name in variants)
    for name in variants:
        if not slug_of(name):
            raise TcmError(f"variants: the name {name!r} has neither letters nor digits; choose another")
        if len(slug_of(name).encode()) > LONGEST_NAME:
            raise TcmError(f"variants: {name[:40]!r}… is too long for a folder's name; choose a shorter one")
        if slugs[slug_of(name)] > 1:
            raise TcmError(
                f"variants: {name!r} and another variant would have the same folder, {slug_of(name)!r}; rename one"
            )


def _check_seeds(seeds: Sequence[int]) -> None:
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise TcmError(f"seeds: {twice[0]} is given twice; give each seed once")
