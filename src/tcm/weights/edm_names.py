"""The reference's parameter names and constructor arguments, to ours and back.

A published EDM, EDM2, ECT or TCM checkpoint names its tensors `model.enc.16x16_block0.conv0.weight`
(EDM2's own files say `unet.` for `model.`).
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from tcm.foundation.tensors import bounded_by, load_tensors
from tcm.method.conditions import Classes
from tcm.method.preconditioning import Denoiser, Uncertainty
from tcm.networks import ImageShape, NetworkConfig
from tcm.weights.arguments import published_network

UNCERTAINTY = {
    "uncertainty.freqs": "logvar_fourier.freqs",
    "uncertainty.phases": "logvar_fourier.phases",
    "uncertainty.weight": "logvar_linear.weight",
}
WRAPPERS = ("module.", "_orig_mod.", "model.", "unet.")


def load_denoiser(weights: Mapping[str, Tensor], arguments: Mapping[str, object]) -> Denoiser:
    """The denoiser of a reference checkpoint: `weights` under its names, `arguments` of its constructor.

    Float16 weights become float32. What is not part of the function is left out (the network says what); any other
    tensor that is missing, unknown or of another shape is an error that names it.
    """
    config, image_shape, condition = parse_arguments(arguments)
    given = {_without_wrappers(name): tensor for name, tensor in weights.items()}
    ignored = config.published_left_out(given)
    given = {name: tensor for name, tensor in given.items() if name not in ignored}
    # Without memory at first: arguments from a foreign file may describe a network larger than its tensors.
    with bounded_by([tensor.shape for tensor in given.values()], "the arguments"), torch.device("meta"):
        head = Uncertainty(given["logvar_linear.weight"].numel()) if "logvar_linear.weight" in given else None
        denoiser = Denoiser(
            config.build(image_shape, condition),
            image_shape,
            condition,
            sigma_data=float(cast(float, arguments.get("sigma_data", 0.5))),
            uncertainty=head,
        )
    ours = {theirs: name for name, theirs in reference_names(denoiser).items()}
    renamed = {ours.get(name, name): tensor for name, tensor in given.items()}
    load_tensors(denoiser, renamed, "the reference's weights", ours)
    return denoiser


def to_reference(denoiser: Denoiser) -> dict[str, Tensor]:
    """The denoiser's weights under the reference's names, with the prefix `model.`: the inverse of `load_denoiser`."""
    names = reference_names(denoiser)
    out = {_with_prefix(names[name]): tensor.detach() for name, tensor in denoiser.state_dict().items()}
    constants = denoiser.network.published_constants().items()
    return out | {_with_prefix(name): tensor for name, tensor in constants}


def parse_arguments(arguments: Mapping[str, object]) -> tuple[NetworkConfig, ImageShape, Classes | None]:
    """The network's config, the image shape and the classes from the reference's constructor arguments."""
    config = published_network(arguments.get("model_type", "SongUNet"))
    side, classes = cast(int, arguments.get("img_resolution")), cast(int, arguments.get("label_dim", 0))
    image_shape = (cast(int, arguments.get("img_channels", 3)), side, side)
    return config.from_published(arguments), image_shape, Classes(classes) if classes else None


def reference_names(denoiser: Denoiser) -> dict[str, str]:
    """Our tensor name ↦ the reference's, without the prefix `model.`."""
    return {f"network.{ours}": theirs for ours, theirs in denoiser.network.published_names().items()} | {
        name: UNCERTAINTY[name] for name in denoiser.state_dict() if name in UNCERTAINTY
    }


def _without_wrappers(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def _with_prefix(name: str) -> str:
    return name if name.startswith("logvar_") else f"model.{name}"
