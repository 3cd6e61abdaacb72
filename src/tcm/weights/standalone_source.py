"""The source of a class as one file: with all that it uses of this package, for people who do not have it."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from tcm.foundation.errors import TcmError

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class _Module:
    """What a module defines and imports at its top level, by name."""

    lines: list[str]
    defined: dict[str, Definition]
    imported: dict[str, tuple[str, str | None]]
    """The module and the name in it; no name for the module itself."""


@dataclass
class _Collected:
    """The parts of the file, each after those that it uses."""

    packages: set[str]
    imports: set[tuple[str, str | None, str]] = field(default_factory=set)
    """Of other packages: the module, the name in it (none for the module itself), and the name here."""
    begun: set[str] = field(default_factory=set)
    """The names whose definitions are in it, or on their way."""
    parts: dict[str, None] = field(default_factory=dict)
    """The text of each definition; a dict keeps them in order, each once."""


def standalone_source(*classes: type, without: frozenset[str] = frozenset()) -> str:
    """One module with these classes and everything that they use from their own packages and ours.

    Annotations keep their text, and what only they mention stays out, as do the names in `without`.
    """
    collected = _Collected({"tcm", *(root.__module__.partition(".")[0] for root in classes)})
    seen = dict.fromkeys(without, "")
    for root in classes:
        _collect(root.__module__, root.__name__, collected, seen)
    head = ["from __future__ import annotations", "\n".join(_import_lines(collected))]
    return "\n\n".join(head) + "\n\n\n" + "\n\n\n".join(collected.parts) + "\n"


def _collect(module_name: str, name: str, collected: _Collected, seen: dict[str, str]) -> None:
    """Add the definition of a name, after what it uses; nothing for a name that the module does not define."""
    module = _read(module_name)
    if name in module.imported:
        source, original = module.imported[name]
        if source.partition(".")[0] in collected.packages and original is not None:
            _collect(source, original, collected, seen)
        else:
            collected.imports.add((source, original, name))
        return
    if name not in module.defined:
        return
    if (first := seen.setdefault(name, module_name)) != module_name and first:
        raise TcmError(f"{first} and {module_name} both define {name}, so one file cannot hold both; rename one")
    if not first or name in collected.begun:
        return
    collected.begun.add(name)
    definition = module.defined[name]
    annotations = {id(part) for annotation in _annotations(definition) for part in ast.walk(annotation)}
    for part in ast.walk(definition):
        if not isinstance(part, ast.Name):
            continue
        ours = module.imported.get(part.id, ("",))[0].partition(".")[0] in collected.packages
        if id(part) not in annotations or (part.id in module.imported and not ours):
            _collect(module_name, part.id, collected, seen)
    collected.parts[_text(definition, module.lines)] = None


@cache
def _read(name: str) -> _Module:
    source = inspect.getsource(import_module(name))
    defined: dict[str, Definition] = {}
    imported: dict[str, tuple[str, str | None]] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.FunctionDef() | ast.ClassDef():
                defined[statement.name] = statement
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                defined[target] = statement
            case ast.Assign(targets=[ast.Tuple(elts=targets)]):
                defined |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
            case ast.ImportFrom(module=str(source_name), names=names):
                imported |= {alias.asname or alias.name: (source_name, alias.name) for alias in names}
            case ast.Import(names=names):
                imported |= {alias.asname or alias.name: (alias.name, None) for alias in names}
    return _Module(source.splitlines(), defined, imported)


def _import_lines(collected: _Collected) -> Iterator[str]:
    for module in sorted({module for module, _, _ in collected.imports}):
        own = [(original, name) for source, original, name in collected.imports if source == module]
        yield from (
            f"import {module}" + ("" if name == module else f" as {name}") for original, name in own if not original
        )
        named = sorted(name if name == original else f"{original} as {name}" for original, name in own if original)
        if named:
            yield f"from {module} import {', '.join(named)}"


def _annotations(definition: Definition) -> Iterator[ast.expr]:
    for part in ast.walk(definition):
        match part:
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.FunctionDef(returns=ast.expr() as annotation):
                yield annotation


def _text(definition: Definition, lines: list[str]) -> str:
    decorators = definition.decorator_list if isinstance(definition, ast.FunctionDef | ast.ClassDef) else []
    first = min([definition.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : definition.end_lineno])
