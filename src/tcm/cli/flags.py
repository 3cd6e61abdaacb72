"""What several commands share: the argument that names a model, and flags that show no value in help texts."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

ModelName = Annotated[
    str,
    typer.Argument(
        help="A model folder, a run's folder (its last stage), a hub id, or a model that comes with the package: "
        "digits, fashion-mnist, cifar10-16."
    ),
]


class Group(TyperGroup):
    """A group whose help, and that of its commands, shows flags without a type."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_types(command.params)
            _without_types([command.get_help_option(ctx)])
        return command


def _without_types(params: Any) -> Any:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return params
