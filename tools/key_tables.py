"""The reference of all keys, written from the schema; `python tools/key_tables.py docs/recipes.md` updates it."""

import dataclasses
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tcm.method.conditions import ConditionKind
from tcm.method.curriculum import Curriculum, Spacing
from tcm.method.distances import Distance
from tcm.method.preconditioning import PRECONDITIONINGS, Preconditioning
from tcm.method.times import TimeDistribution
from tcm.networks import NETWORKS
from tcm.networks.diffusers_unet import Lora, NoiseSchedule
from tcm.recipes.schema import DataSpec, Recipe
from tcm.recipes.stages import STAGES, GuardSpec, Stage
from tcm.recipes.stages.base import TIMES
from tcm.recipes.stages.consistency import DISTANCES
from tcm.recipes.tables import TAGS, toml_value
from tcm.weights.card import CONDITION_KINDS

NAMES = {bool: "true or false", int: "integer", float: "number", str: "text"}

CHOICES: dict[Any, list[type]] = {
    ConditionKind: [*CONDITION_KINDS.values()],
    Distance: [*DISTANCES.values()],
    Preconditioning: [*PRECONDITIONINGS.values()],
    Spacing: [Curriculum],
    TimeDistribution: [*TIMES.values()],
}
"""Our own classes for keys that take any class."""

MARK = "<!-- Below this line: written by `python tools/key_tables.py docs/recipes.md`. -->"


def _sections_of_stages() -> list[tuple[str, type[BaseModel], type[BaseModel] | None]]:
    """The keys that each stage adds; keys that several objectives share are listed with the first."""
    objectives: dict[type[BaseModel], list[str]] = {}
    for objective, stage in STAGES.items():
        for model in reversed(stage.__mro__):
            if issubclass(model, Stage) and model is not Stage:
                objectives.setdefault(model, []).append(f"`{toml_value(objective)}`")
    return [
        (f"`objective = {' or '.join(names).removeprefix('`')}: also", model, model.__bases__[0])
        for model, names in objectives.items()
    ]


SECTIONS: tuple[tuple[str, type[BaseModel], type[BaseModel] | None], ...] = (
    ("The recipe", Recipe, None),
    ("`[data]`", DataSpec, None),
    *((f"`[network]` with `kind = {toml_value(kind)}`", config, None) for kind, config in NETWORKS.items()),
    ("`[network.noise]`", NoiseSchedule, None),
    ("`[network.lora]`", Lora, None),
    ("`[stages.NAME]`: every stage", Stage, None),
    *_sections_of_stages(),
    ("`guard`", GuardSpec, None),
)
"""Title, model, and the model whose keys an earlier section has described."""


def reference() -> str:
    """All keys of a recipe as Markdown tables: type, default, meaning."""
    lines = []
    for title, model, described in SECTIONS:
        lines += [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        known = {} if described is None else described.model_fields
        names = [name for name in model.model_fields if name not in known]
        for name in sorted(names, key=lambda name: name not in TAGS):
            field = model.model_fields[name]
            lines.append(f"| `{name}` | {_type(field)} | {_default(name, field)} | {meaning(model, name)} |")
        lines.append("")
    return "\n".join(lines + _values())


def _values() -> list[str]:
    """Keys whose values are those of `tcm.method` itself."""
    lines = ["### Values of the method", "", "| key | table | meaning |", "|---|---|---|"]
    found = {
        (name, kind): None
        for _, model, _ in SECTIONS
        for name, field in model.model_fields.items()
        for kind in _dataclasses(field.annotation)
    }
    for key, kind in found:
        fields = dataclasses.fields(kind)
        shown = {field.name: "…" if field.default is dataclasses.MISSING else field.default for field in fields}
        table = toml_value(shown).replace('"…"', "…")
        first = (kind.__doc__ or "").splitlines()[0]
        lines.append(f"| `{key}` | `{table}` | {first} |")
    return [*lines, ""]


def _dataclasses(annotation: Any) -> list[type]:
    if annotation in CHOICES:
        return CHOICES[annotation]
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _dataclasses(argument)]


def renewed(page: str) -> str:
    """The page with the text below the mark replaced by the current reference."""
    above, mark, _ = page.partition(MARK)
    return f"{above}{MARK}\n\n{reference()}" if mark else page


def meaning(model: type[BaseModel], name: str) -> str:
    """A key's description: its own, that of the model which declares it first, or what the model says of itself."""
    models = [base for base in model.__mro__ if issubclass(base, BaseModel) and name in base.model_fields]
    return next((text for base in models if (text := base.model_fields[name].description)), model.__doc__ or "")


def _type(field: FieldInfo) -> str:
    if field.discriminator is not None:
        return "table"
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{toml_value(argument)}`" for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin in (Union, UnionType):
        names = dict.fromkeys(_type_name(argument) for argument in arguments if argument is not NoneType)
        return " or ".join([*names, *(['`"none"`'] if NoneType in arguments else [])])
    if annotation in NAMES:
        return NAMES[annotation]
    return "table"


def _default(name: str, field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "see there"
    if field.default is PydanticUndefined or name in TAGS:
        return "required"
    return f"`{toml_value(field.default)}`"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text("utf-8")), "utf-8")
