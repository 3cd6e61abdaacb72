"""Published checkpoints into our model format: find the network, name what was found, build the model."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from tcm.foundation.errors import TcmError
from tcm.foundation.tensors import shapes_in, tensors_in
from tcm.method.conditions import Classes, ConditionKind
from tcm.networks import ImageShape, networks
from tcm.weights.arguments import arguments_of_module, arguments_of_tensors, arguments_of_text, published_network
from tcm.weights.card import CONFIG_FILE, WEIGHTS_FILE, ModelCard, Provenance
from tcm.weights.edm_names import load_denoiser, parse_arguments
from tcm.weights.exported_origin import Origin, read_origin
from tcm.weights.model import Model
from tcm.weights.module_pickles import MAX_NAME, Module, as_module, read_published, submodules, tensors
from tcm.weights.pickles import Refused, refusal, shown
from tcm.weights.torchfiles import read_torch

ModelKind = Literal["diffusion", "consistency", "truncated"]
"""What published models were trained as."""

PLAIN_NAME = re.compile(r"[\w.\-]+", re.ASCII)
OTHER_PRECONDITIONING = {"VPPrecond", "VEPrecond", "iDDPMPrecond"}
KIND_OF_CLASS: dict[str, ModelKind] = {"EDMPrecond": "diffusion", "Precond": "diffusion"}
CONSISTENCY_CLASSES = {"ECMPrecond"}
PRECISIONS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64}
OWN_NAMES = ("network.", "uncertainty.")
MAX_NESTING = 4
UNKNOWN_LICENCE = "unknown; ask the publisher"


@dataclass(frozen=True)
class Found:
    """What a checkpoint file holds: tensors under the reference's names, the constructor's arguments, and the rest."""

    described: str
    prefix: str
    weights: Mapping[str, Tensor]
    arguments: Mapping[str, object]
    licence: str
    kind: ModelKind | None = None
    origin: Origin | None = None
    """What an export of ours says about itself."""
    not_used: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Imported:
    """A model and the account of how it came about."""

    model: Model
    found: Found
    left_out: Mapping[str, str]
    parameters: int

    @property
    def precisions(self) -> str:
        """The number types in the file, such as `float16`."""
        return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in self.found.weights.values()}))


def import_checkpoint(
    path: Path, kind: ModelKind | None = None, t_prime: float | None = None, second_time: float | None = None
) -> Imported:
    """The model in a checkpoint of EDM, EDM2, ECT, TCM or FastGen; nothing in the file is run.

    `kind` says what the weights were trained as where the file does not; a truncated model needs its `t_prime`.
    Without a `second_time`, that of two sampling steps is the paper's for the data.

    >>> import_checkpoint(Path("edm-cifar10-32x32-uncond-vp.pkl")).model.save("edm-cifar10")  # doctest: +SKIP
    """
    found = read_checkpoint(path)
    if found.origin is not None and (kind, t_prime, second_time) == (None, None, None):
        return _built(found, found.origin, path)
    chosen = kind or found.kind
    if chosen is None:
        raise TcmError(f"{path}: does not say what it was trained as; add --as diffusion, consistency or truncated")
    # A foreign file does not describe its model; what its kind implies is spelled out here.
    if (chosen == "truncated") != (t_prime is not None):
        raise TcmError(
            f"--t-prime={t_prime} does not fit --as {chosen}; a truncated model needs its t', such as 1.0, and other "
            "models have none"
        )
    if t_prime is not None and not 0.002 < t_prime < 80:
        raise TcmError(f"--t-prime={t_prime} must lie between 0.002 and 80")
    low = t_prime or 0.002
    if second_time is not None and chosen == "diffusion":
        raise TcmError(
            f"--second-time={second_time} is for consistency models, but this is a diffusion model; remove it"
        )
    if second_time is not None and not low <= second_time < 80:
        raise TcmError(f"--second-time={second_time} must be at least {low} and below 80, where the model is defined")
    with _errors_of(path):
        _, image_shape, condition = parse_arguments(found.arguments)
    second = None
    if chosen != "diffusion":
        second = second_time or max(published_second_time(image_shape, condition), low)
    origin = Origin(
        kind=chosen,
        t_min=low,
        t_max=80.0,
        second_time=second,
        provenance=Provenance(licence=found.licence),
    )
    return _built(found, origin, path)


def _built(found: Found, origin: Origin, path: Path) -> Imported:
    """The model of the weights in a file, with all else that is known of it."""
    with _errors_of(path):
        config, image_shape, condition = parse_arguments(found.arguments)
        ignored = config.published_left_out(found.weights)
        denoiser = load_denoiser(found.weights, found.arguments)
        if condition is not None and origin.class_names:
            condition = Classes(condition.count, origin.class_names)
    denoiser.t_min, denoiser.t_max = origin.t_min, origin.t_max
    head = denoiser.uncertainty
    with _errors_of(path):
        card = ModelCard(
            kind=origin.kind,
            sampler=origin.sampler,
            network=config,
            image_shape=image_shape,
            condition=condition,
            sigma_data=denoiser.sigma_data,
            t_min=denoiser.t_min,
            t_max=denoiser.t_max,
            uncertainty=head.weight.numel() if head else 0,
            provenance=origin.provenance.model_copy(update={"imported_from": path.name}),
        )
    parameters = sum(parameter.numel() for parameter in denoiser.network.parameters())
    return Imported(Model(denoiser, card), found, ignored, parameters)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Whatever a file's arguments or weights make impossible as an error that names the file."""
    try:
        yield
    except (RuntimeError, ArithmeticError, ValueError) as error:
        if isinstance(error, TcmError):
            raise TcmError(f"{path}: {error}") from error
        raise TcmError(
            f"{path}: its arguments do not make a valid network ({shown(str(error))}); download it again"
        ) from error


def published_second_time(image_shape: ImageShape, condition: ConditionKind | None) -> float:
    """The time of the second of two sampling steps in the paper, by the data: ImageNet-64, or anything else.

    >>> published_second_time((3, 64, 64), Classes(1000)), published_second_time((3, 32, 32), None)
    (1.526, 1.0)
    """
    return 1.526 if (image_shape, condition) == ((3, 64, 64), Classes(1000)) else 1.0


def read_checkpoint(path: Path) -> Found:
    """What a file holds, by its suffix."""
    try:
        match path.suffix:
            case ".pkl":
                found = from_modules(read_published(path), path)
            case ".pth" | ".pt":
                found = from_state_dict(read_torch(path), path, {})
            case ".safetensors":
                found = from_safetensors(path)
            case other:
                raise TcmError(f"{path}: suffix {other!r} is not known; give a .pkl, .pth, .pt or .safetensors file")
    except Refused as reason:
        raise refusal(str(path), reason) from None
    # One tensor under many names could make a small file fill the memory.
    if sum(tensor.nbytes for tensor in found.weights.values()) > 2 * path.stat().st_size:
        raise TcmError(f"{path}: its tensors are larger than the file; download the file again")
    for name, tensor in found.weights.items():
        if tensor.dtype not in PRECISIONS or not bool(torch.isfinite(tensor).all()):
            raise TcmError(f"{path}: {name} ({tensor.dtype}) holds NaN or infinity; download the file again")
    return found


def from_modules(content: object, path: Path) -> Found:
    """The network in a pickle of whole modules: `ema`, or `net` where there is no average."""
    entries = content if isinstance(content, dict) else {}
    key = next((key for key in ("ema", "net") if entries.get(key) is not None), None)
    module = as_module(entries[key]) if key else None
    if key is None or module is None:
        raise TcmError(f"{path}: holds no network under `ema` or `net`; give a checkpoint of EDM, EDM2, ECT or TCM")
    inner_name, network = inner_network(module, path)
    encoder = as_module(entries.get("encoder"))
    if encoder and encoder.class_name != "StandardRGBEncoder":
        raise TcmError(
            f"{path}: works on the latents of a {shown(encoder.class_name)}, but only images are supported; use the "
            "64×64 model"
        )
    weights = plainly_named(dict(tensors(entries[key])), path)
    others = [str(other) for other in entries if other not in (key, "encoder") and entries[other] is not None]
    not_used = {shown(other): "not part of the network" for other in others}
    if encoder:
        not_used["encoder"] = "maps bytes to [-1, 1], as everything here does"
    return Found(
        described=f"{key}: {module.class_name} around a {network.class_name}",
        prefix=f"{inner_name}.",
        weights=weights,
        arguments=arguments_of_module(module, network, path),
        licence=stated_licence(f"{module.source}\n{network.source}", module.class_name),
        kind=KIND_OF_CLASS.get(module.class_name),
        not_used=not_used,
    )


def inner_network(module: Module, path: Path) -> tuple[str, Module]:
    """The network inside a preconditioning, if both are of a kind that we have."""
    name = shown(module.class_name)
    if module.class_name in OTHER_PRECONDITIONING:
        raise TcmError(
            f"{path}: {name} preconditions differently from EDM (another c_skip, c_out, c_noise), "
            "but the method needs EDM's; use the EDMPrecond checkpoint for the same data"
        )
    if module.class_name not in KIND_OF_CLASS.keys() | CONSISTENCY_CLASSES:
        raise TcmError(
            f"{path}: the class {name} is not known; if it preconditions as EDM does, save its state dict as "
            ".safetensors and import that"
        )
    inside = submodules(module.state)
    inner_name = next((name for name in ("model", "unet") if name in inside), None)
    network = as_module(inside[inner_name]) if inner_name else None
    if inner_name is None or network is None:
        raise TcmError(f"{path}: {name} holds no network under `model` or `unet`; download the file again")
    try:
        published_network(network.class_name)
    except TcmError as error:
        raise TcmError(f"{path}: {error}") from None
    return inner_name, network


def from_safetensors(path: Path) -> Found:
    """A state dict in a safetensors file; its metadata may hold the constructor's arguments and a licence."""
    shapes_in(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    weights = tensors_in(path)
    return from_state_dict(weights, path, metadata)


def from_state_dict(content: object, path: Path, metadata: Mapping[str, str]) -> Found:
    """The network in a state dict, which may lie inside other dicts (FastGen's do) and have any prefix."""
    marks = {config.published_mark for config in networks().values() if config.published_mark}
    found = {
        f"{location}{match['prefix']}": (values, match["prefix"])
        for location, values in state_dicts(content)
        for name in values
        for mark in marks
        if (match := re.fullmatch(f"(?P<prefix>.*?){mark}", name))
    }
    averaged = [name for name in found if "ema" in name]
    chosen = averaged if len(averaged) == 1 else list(found)
    _refuse_own_weights(content, path)
    if len(chosen) != 1:
        several = f"several networks ({', '.join(shown(name) for name in chosen[:4])})" if chosen else "no network"
        raise TcmError(f"{path}: holds {several}; save the one you want as a separate state dict")
    values, prefix = found[chosen[0]]
    outside = prefix.removesuffix("model.").removesuffix("unet.")
    # EDM2's head is next to the network, not inside it.
    weights = {name.removeprefix(prefix): tensor for name, tensor in values.items() if name.startswith(prefix)}
    heads = (f"{outside}logvar_fourier.", f"{outside}logvar_linear.")
    weights |= {name.removeprefix(outside): tensor for name, tensor in values.items() if name.startswith(heads)}
    plain = plainly_named(weights, path)
    stated = arguments_of_text(metadata, path)
    arguments_from = "arguments in its metadata" if stated else "arguments inferred from its shapes, dropout unknown"
    not_used = {shown(name): "another network" for name in found if name != chosen[0]}
    unused = [name for name in values if not name.startswith((prefix, *heads))]
    not_used |= {shown(name): "outside the network" for name in unused}
    origin = read_origin(metadata, path)
    what = "a state dict" if origin is None else "a model that `tcm export` wrote"
    unstated = UNKNOWN_LICENCE if origin is None else "none was recorded with the exported model"
    return Found(
        described=f"{what}{f' at {shown(chosen[0])}' if chosen[0] else ''}; {arguments_from}",
        prefix=shown(prefix),
        weights=plain,
        arguments=stated or arguments_of_tensors(plain, path),
        licence=shown(metadata.get("license", unstated)),
        origin=origin,
        not_used=not_used,
    )


def _refuse_own_weights(content: object, path: Path) -> None:
    """Say what a model.safetensors of ours is: weights whose folder is already a model."""
    if isinstance(content, dict) and content and all(str(name).startswith(OWN_NAMES) for name in content):
        raise TcmError(
            f"{path}: holds the weights of a model folder of this project, which needs no import; use its folder "
            f"{path.parent} (with {CONFIG_FILE} and {WEIGHTS_FILE}) as it is"
        )


def state_dicts(content: object, location: str = "", depth: int = 0) -> list[tuple[str, dict[str, Tensor]]]:
    """The dicts of tensors inside dicts, with the names that lead to them."""
    if not isinstance(content, dict) or depth > MAX_NESTING:
        return []
    if any(len(str(name)) > MAX_NAME for name in content):
        raise Refused(f"a name of more than {MAX_NAME} characters")
    own = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    inside = [
        found
        for name, value in content.items()
        if isinstance(value, dict)
        for found in state_dicts(value, f"{location}{name}.", depth + 1)
    ]
    return [(location, own), *inside] if own else inside


def plainly_named(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The same tensors, if there are any and all of their names are plain: they appear in messages later."""
    strange = next((name for name in weights if not PLAIN_NAME.fullmatch(name)), None)
    if strange is not None:
        raise TcmError(f"{path}: a tensor is named {shown(strange)!r}; download the file again")
    if not weights:
        raise TcmError(f"{path}: its network has no tensors; download the file again")
    return weights


def stated_licence(source: str, class_name: str) -> str:
    """The licence that the file itself states: the header of its modules' source, read as text.

    >>> stated_licence("# licensed under a Creative Commons\\n# Attribution-NonCommercial-ShareAlike 4.0", "EDMPrecond")
    'CC BY-NC-SA 4.0: non-commercial use only'
    """
    words = " ".join(source.lower().replace("#", " ").split())
    if "attribution-noncommercial-sharealike 4.0" in words:
        return "CC BY-NC-SA 4.0: non-commercial use only"
    if "nvidia source code license" in words or "nvidia license" in words:
        return "NVIDIA Source Code License: non-commercial use only"
    if class_name in CONSISTENCY_CLASSES:
        return "none stated by the publisher; ask before you use it"
    return UNKNOWN_LICENCE


def parameter_count(count: int) -> str:
    """55734147 as 55.7 M."""
    return f"{count / 1e6:.1f} M" if count >= 1e5 else str(count)
