"""The reference's parameter names and constructor arguments, to ours and back.

A published EDM, EDM2, ECT or TCM checkpoint names its tensors `model.enc.16x16_block0.conv0.weight`
(EDM2's own files say `unet.` for `model.`).
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from tcm.errors import TcmError
from tcm.method.preconditioning import Denoiser, Uncertainty
from tcm.networks import DDPMpp, DDPMppConfig, EDM2Config, build_network
from tcm.networks.edm2 import EDM2
from tcm.networks.layers import BlockPlan, resolution
from tcm.weights.tensors import check_tensors, load_tensors

DDPMPP_PARTS = {
    "norm_0": "norm0",
    "conv_0": "conv0",
    "affine": "affine",
    "norm_1": "norm1",
    "conv_1": "conv1",
    "skip": "skip",
    "attention.norm": "norm2",
    "attention.qkv": "qkv",
    "attention.proj": "proj",
}
DDPMPP_OUTSIDE = {
    "embed_label": "map_label",
    "embed_0": "map_layer0",
    "embed_1": "map_layer1",
}
EDM2_PARTS = {
    "skip": "conv_skip",
    "conv_0": "conv_res0",
    "affine": "emb_linear",
    "affine_gain": "emb_gain",
    "conv_1": "conv_res1",
    "attention.qkv": "attn_qkv",
    "attention.proj": "attn_proj",
}
EDM2_OUTSIDE = {
    "embed_fourier": "emb_fourier",
    "embed_noise": "emb_noise",
    "embed_label": "emb_label",
    "conv_out": "out_conv",
    "gain_out": "out_gain",
}
UNCERTAINTY = {
    "uncertainty.freqs": "logvar_fourier.freqs",
    "uncertainty.phases": "logvar_fourier.phases",
    "uncertainty.weight": "logvar_linear.weight",
}
WRAPPERS = ("module.", "_orig_mod.", "model.", "unet.")


def load_denoiser(weights: Mapping[str, Tensor], arguments: Mapping[str, object]) -> Denoiser:
    """The denoiser of a reference checkpoint: `weights` under its names, `arguments` of its constructor.

    Float16 weights become float32. What is not part of the function is left out (see `left_out`); any other tensor
    that is missing, unknown or of another shape is an error that names it.
    """
    config, image_shape, classes = parse_arguments(arguments)
    given = {_without_wrappers(name): tensor for name, tensor in weights.items()}
    ignored = left_out(given)
    given = {name: tensor for name, tensor in given.items() if name not in ignored}
    # Without memory at first: arguments from a foreign file may describe a network larger than its tensors.
    with torch.device("meta"):
        head = Uncertainty(given["logvar_linear.weight"].numel()) if "logvar_linear.weight" in given else None
        denoiser = Denoiser(
            build_network(config, image_shape, classes),
            image_shape,
            classes,
            sigma_data=float(cast(float, arguments.get("sigma_data", 0.5))),
            uncertainty=head,
        )
    ours = {theirs: name for name, theirs in reference_names(denoiser).items()}
    renamed = {ours.get(name, name): tensor for name, tensor in given.items()}
    check_tensors(denoiser, renamed, "the reference's weights", ours)
    load_tensors(denoiser, renamed, "the reference's weights", ours)
    return denoiser


def left_out(names: Mapping[str, Tensor]) -> dict[str, str]:
    """The tensors of a reference checkpoint that have no place here, each with the reason."""
    reasons = {}
    for name, tensor in names.items():
        if "map_augment." in name:
            reasons[name] = "conditions on augmentations, of which there are none here"
        elif name.endswith("resample_filter"):
            if tensor.numel() != 4 or not torch.allclose(tensor.float(), torch.full_like(tensor.float(), 0.25)):
                raise TcmError(f"{name} is not the filter [1, 1]; NCSN++ and other filters are not supported")
            reasons[name] = "the constant filter [1, 1]"
    return reasons


def to_reference(denoiser: Denoiser) -> dict[str, Tensor]:
    """The denoiser's weights under the reference's names, with the prefix `model.`: the inverse of `load_denoiser`."""
    names = reference_names(denoiser)
    out = {_with_prefix(names[name]): tensor.detach() for name, tensor in denoiser.state_dict().items()}
    if isinstance(denoiser.network, DDPMpp):
        for name in [name for name in out if name.endswith((".skip.weight", ".conv0.weight"))]:
            layer = name.removesuffix(".weight")
            if layer.split("_")[-1].split(".")[0] in ("up", "down"):
                out[f"{layer}.resample_filter"] = torch.full((1, 1, 2, 2), 0.25)
    return out


def parse_arguments(
    arguments: Mapping[str, object],
) -> tuple[DDPMppConfig | EDM2Config, tuple[int, int, int], int]:
    """The network's config, the image shape and the number of classes from the reference's constructor arguments."""

    def get(name: str, default: object) -> object:
        return arguments.get(name, default)

    side = cast(int, get("img_resolution", None))
    image_shape = (cast(int, get("img_channels", 3)), side, side)
    shared = {
        "dropout": get("dropout", 0.0),
        "attention": tuple(cast(list[int], get("attn_resolutions", [16]))),
    }
    match get("model_type", "SongUNet"):
        case "SongUNet":
            _check_ddpmpp(arguments)
            config: DDPMppConfig | EDM2Config = DDPMppConfig.model_validate(
                shared
                | {
                    "channels": get("model_channels", 128),
                    "channel_mult": tuple(cast(list[int], get("channel_mult", [2, 2, 2]))),
                    "blocks": get("num_blocks", 4),
                    "noise_mult": get("channel_mult_noise", 1),
                }
            )
        case "EDM2UNet" | "UNet":
            drops_at = cast(list[int], get("dout_resolutions", [16]))
            config = EDM2Config.model_validate(
                shared
                | {
                    "channels": get("model_channels", 192),
                    "attention": tuple(cast(list[int], get("attn_resolutions", [16, 8]))),
                    "channel_mult": tuple(cast(list[int], get("channel_mult", [1, 2, 3, 4]))),
                    "blocks": get("num_blocks", 3),
                    "dropout_up_to": max(drops_at),
                }
            )
        case other:
            raise TcmError(f"model_type={other!r} is not supported; DDPM++ (SongUNet) and EDM2 (UNet) are")
    return config, image_shape, cast(int, get("label_dim", 0))


def _check_ddpmpp(arguments: Mapping[str, object]) -> None:
    needed = {
        "embedding_type": "positional",
        "encoder_type": "standard",
        "decoder_type": "standard",
        "resample_filter": [1, 1],
    }
    for name, value in needed.items():
        given = arguments.get(name, value)
        if (list(given) if isinstance(given, tuple) else given) != value:
            raise TcmError(f"{name}={given!r} makes this an NCSN++, which is not supported; DDPM++ has {value!r}")


def reference_names(denoiser: Denoiser) -> dict[str, str]:
    """Our tensor name ↦ the reference's, without the prefix `model.`."""
    network = denoiser.network
    full = resolution(denoiser.image_shape, 0)
    match network:
        case DDPMpp():
            parts, paths = DDPMPP_PARTS, dict(DDPMPP_OUTSIDE)
            paths |= {"norm_out": f"dec.{full}x{full}_aux_norm", "conv_out": f"dec.{full}x{full}_aux_conv"}
        case EDM2():
            parts, paths = EDM2_PARTS, dict(EDM2_OUTSIDE)
        case _:
            raise TcmError(f"network={type(network).__name__} has no names in the reference; DDPM++ and EDM2 have")
    paths["conv_in"] = f"enc.{full}x{full}_conv"
    plans = (("encoder", "enc", network.encoder_plan[1:]), ("decoder", "dec", network.decoder_plan))
    for ours, theirs, blocks in plans:
        for place, plan in enumerate(blocks):
            name = _block_name(plan, denoiser.image_shape)
            paths |= {f"{ours}.{place}.{part}": f"{theirs}.{name}.{other}" for part, other in parts.items()}
    return {name: UNCERTAINTY.get(name) or _translate(name, paths) for name in denoiser.state_dict()}


def _translate(name: str, paths: Mapping[str, str]) -> str:
    inside = name.removeprefix("network.")
    if inside in paths:
        return paths[inside]
    module, _, leaf = inside.rpartition(".")
    return f"{paths[module]}.{leaf}"


def _block_name(plan: BlockPlan, image_shape: tuple[int, int, int]) -> str:
    side = resolution(image_shape, plan.level)
    index = plan.index if plan.kind in ("in", "block") else ""
    return f"{side}x{side}_{plan.kind}{index}"


def _without_wrappers(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def _with_prefix(name: str) -> str:
    return name if name.startswith("logvar_") else f"model.{name}"
