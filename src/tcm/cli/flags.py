"""What several commands share: the argument that names a model, flags without a value in help texts, options once."""

from collections import Counter
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from tcm.foundation.errors import TcmError

ModelName = Annotated[
    str,
    typer.Argument(
        help="A model folder, a run's folder (its last stage), a hub id, or a model that comes with the package: "
        "digits, fashion-mnist, cifar10-16."
    ),
]


class Group(TyperGroup):
    """A group whose help, and that of its commands, shows flags without a type.

    Of an option that takes one value, its commands do not silently take the last of several.
    """

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_types(command.params)
            _without_types([command.get_help_option(ctx)])
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, TyperGroup) and not ctx.resilient_parsing:
            inner = command.context_class(command, info_name=name, parent=ctx)
            *_, order = command.make_parser(inner).parse_args(list(rest))
            for option, count in Counter(order).items():
                if count > 1 and isinstance(option, TyperOption) and not option.multiple and not option.is_flag:
                    raise TcmError(f"{option.opts[-1]} is given {count} times, but takes one value; give it once")
        return name, command, rest


def _without_types(params: Any) -> Any:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return params
