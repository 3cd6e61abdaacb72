"""Our models under the reference's names, for those who want to go back."""

import json
import os
from pathlib import Path

from safetensors.torch import save_file

from tcm.errors import TcmError
from tcm.networks import DDPMppConfig, EDM2Config
from tcm.weights.model import Model, ModelCard
from tcm.weights.reference import to_reference


def export_state_dict(model: Model, path: Path) -> int:
    """Write a safetensors file with the reference's parameter names; returns how many tensors it holds.

    The metadata holds the reference's constructor arguments, each as JSON, so that `tcm import` reads the file back,
    bit for bit.

    >>> export_state_dict(tcm.load("edm-cifar10"), Path("edm-cifar10.safetensors"))  # doctest: +SKIP
    424
    """
    if path.exists():
        raise TcmError(f"{path} exists; give another name with --out")
    metadata = {name: json.dumps(value) for name, value in reference_arguments(model.card).items()}
    if model.card.provenance.licence:
        metadata["license"] = model.card.provenance.licence
    tensors = {name: tensor.contiguous().cpu() for name, tensor in to_reference(model.denoiser).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    save_file(tensors, part, metadata=metadata)
    os.replace(part, path)
    return len(tensors)


def reference_arguments(card: ModelCard) -> dict[str, object]:
    """The reference's constructor arguments for a model: the inverse of `tcm.weights.reference.parse_arguments`."""
    channels, height, width = card.image_shape
    if height != width:
        raise TcmError(f"image_shape={card.image_shape} is not square, and the reference knows square images only")
    config = card.network
    shared: dict[str, object] = {
        "img_resolution": height,
        "img_channels": channels,
        "label_dim": card.classes,
        "sigma_data": card.sigma_data,
        "model_channels": config.channels,
        "channel_mult": list(config.channel_mult),
        "num_blocks": config.blocks,
        "attn_resolutions": list(config.attention),
        "dropout": config.dropout,
    }
    match config:
        case DDPMppConfig():
            return shared | {
                "model_type": "SongUNet",
                "channel_mult_noise": config.noise_mult,
                "embedding_type": "positional",
                "encoder_type": "standard",
                "decoder_type": "standard",
                "resample_filter": [1, 1],
            }
        case EDM2Config():
            drops_at = [config.dropout_up_to >> level for level in range(config.dropout_up_to.bit_length())]
            return shared | {"model_type": "EDM2UNet", "dout_resolutions": drops_at}
