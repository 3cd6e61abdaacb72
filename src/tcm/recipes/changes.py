"""What a resumed run may change: each key of the schema says it itself."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from tcm.recipes.resolve import differences
from tcm.recipes.schema import Recipe
from tcm.recipes.stages.optimization import OnResume


@dataclass(frozen=True)
class Change:
    """A key in which a run's recipe and the one that is given now differ.

    `rule` is what the schema allows; None if the key may not change, or not like this.
    """

    key: str
    text: str
    rule: OnResume | None

    @property
    def stage(self) -> str:
        """The stage whose key it is; of a key of the whole recipe its first part."""
        return self.key.partition(".")[0]


def changes(noted: Recipe, given: Recipe) -> list[Change]:
    """All keys that differ, each with what the schema says about it.

    >>> from tcm.recipes.resolve import resolve
    >>> cifar10, other = resolve("cifar10"), resolve("cifar10", ["truncated.keep=5", "*.steps=1000", "seed=1"])
    >>> [(change.key, change.rule) for change in changes(cifar10, other)]
    [('seed', None), ('consistency.steps', None), ('truncated.steps', None), ('truncated.keep', 'free')]
    """
    rules = resume_rules(given)
    found = []
    for text in differences(noted, given):
        key = text.partition(": ")[0]
        stage, _, name = key.partition(".")
        rule = rules.get(key)
        if rule == "longer" and getattr(noted.stages[stage], name) > getattr(given.stages[stage], name):
            rule = None
        found.append(Change(key, text, rule))
    return found


def resume_rules(recipe: Recipe) -> dict[str, OnResume]:
    """What a resumed run may change, by key, such as `truncated.keep`."""
    return dict(_rules(recipe))


def _rules(table: BaseModel, prefix: str = "") -> Iterator[tuple[str, OnResume]]:
    for name, field in type(table).model_fields.items():
        extra, value = field.json_schema_extra, getattr(table, name)
        if isinstance(extra, dict) and "on_resume" in extra:
            yield f"{prefix}{name}", extra["on_resume"]  # type: ignore[misc]  # as `on_resume` wrote it
        if isinstance(value, BaseModel):
            yield from _rules(value, f"{prefix}{name}.")
        elif name == "stages":
            for stage, keys in value.items():
                yield from _rules(keys, f"{stage}.")
