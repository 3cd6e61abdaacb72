"""The reference's constructor arguments: from a pickled module, from text, or from the shapes of the tensors."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.networks import NetworkConfig, networks
from tcm.weights.exported_origin import ORIGIN_KEY
from tcm.weights.module_pickles import Module
from tcm.weights.pickles import shown

POSITIONAL = ("img_resolution", "img_channels", "label_dim")


class Frame(BaseModel):
    """The arguments of the preconditioning around a network, within bounds that keep a hostile file from harm."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    img_resolution: int = Field(gt=0, le=4096)
    img_channels: int = Field(gt=0, le=64)
    label_dim: int = Field(default=0, ge=0, le=100_000)
    sigma_data: float = Field(default=0.5, gt=0, le=100)


def published_network(model_type: object) -> type[NetworkConfig]:
    """The network that is the reference's class of this name: one of ours, or one of an installed package."""
    known = networks().values()
    found = next((config for config in known if model_type in config.published_types), None)
    if found is None:
        names = ", ".join(name for config in known for name in config.published_types)
        raise TcmError(f"the network {shown(str(model_type))!r} is not supported; supported are: {names}")
    return found


def checked(given: Mapping[str, object], path: Path) -> dict[str, object]:
    """The arguments that matter, each of a valid type and size; any other is an error that names it."""
    frame = {name: given[name] for name in Frame.model_fields if name in given}
    own = {name: value for name, value in given.items() if name not in frame and name != "model_type"}
    try:
        network = published_network(given.get("model_type"))
        arguments = Frame.model_validate(frame).model_dump() | network.check_published(own)
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False)[0]
        name = shown(".".join(str(part) for part in first["loc"]))
        what = "is not known" if first["type"] == "extra_forbidden" else shown(first["msg"])
        raise TcmError(f"{path}: the constructor's argument {name}: {what}; download the file again") from None
    except TcmError as error:
        raise TcmError(f"{path}: {error}") from None
    return {"model_type": given["model_type"]} | arguments


def arguments_of_module(module: Module, network: Module, path: Path) -> dict[str, object]:
    """The arguments that a pickled preconditioning and its network were made with."""
    if len(module.arguments) > len(POSITIONAL):
        raise TcmError(
            f"{path}: {shown(module.class_name)} has {len(module.arguments)} unnamed arguments; download it again"
        )
    named = dict(zip(POSITIONAL, module.arguments, strict=False))
    defaults = published_network(network.class_name).published_defaults
    given = {**defaults, **network.keyword_arguments, **module.keyword_arguments, **named}
    return checked({**given, "model_type": network.class_name}, path)


def arguments_of_text(metadata: Mapping[str, str], path: Path) -> dict[str, object] | None:
    """The arguments in a safetensors file's metadata, each as JSON; None if there are none."""
    if "model_type" not in metadata:
        return None
    known = {name: value for name, value in metadata.items() if name not in ("format", "license", ORIGIN_KEY)}
    try:
        arguments = {name: json.loads(value) for name, value in known.items()}
    except (ValueError, RecursionError) as error:
        raise TcmError(f"{path}: its metadata is not JSON ({shown(str(error))}); download it again") from error
    return checked(arguments, path)


def arguments_of_tensors(weights: Mapping[str, Tensor], path: Path) -> dict[str, object]:
    """The arguments that fit the names and shapes of a network's tensors, as the network that knows them says."""
    for config in networks().values():
        if found := config.infer_published(weights):
            return checked({"model_type": config.published_types[0]} | found, path)
    raise TcmError(f"{path}: the network cannot be inferred from its tensors; supported are: {', '.join(networks())}")
