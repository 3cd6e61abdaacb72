"""Our models under the reference's names, for those who want to go back."""

import json
from pathlib import Path

from safetensors.torch import save_file

from tcm.foundation.errors import TcmError
from tcm.foundation.files import written_aside
from tcm.method.preconditioning import USUAL
from tcm.networks.layers import class_count
from tcm.weights.card import ModelCard
from tcm.weights.edm_names import to_reference
from tcm.weights.exported_origin import ORIGIN_KEY, origin_of
from tcm.weights.model import Model


def export_state_dict(model: Model, path: Path) -> int:
    """Write a safetensors file with the reference's parameter names; returns how many tensors it holds.

    The metadata holds the reference's constructor arguments, each as JSON, and what else our card says, so that
    `tcm import` reads the file back without flags, bit for bit.

    >>> export_state_dict(tcm.load("edm-cifar10"), Path("edm-cifar10.safetensors"))  # doctest: +SKIP
    424
    """
    if path.exists():
        raise TcmError(f"{path} exists; give another name with --out")
    model.card.check_alone("the reference's format")
    metadata = {name: json.dumps(value) for name, value in reference_arguments(model.card).items()}
    if (origin := origin_of(model.card)) is not None:
        metadata[ORIGIN_KEY] = origin.model_dump_json()
    if model.card.provenance.licence:
        metadata["license"] = model.card.provenance.licence
    tensors = {name: tensor.contiguous().cpu() for name, tensor in to_reference(model.denoiser).items()}
    with written_aside(path) as aside:
        save_file(tensors, aside, metadata=metadata)
    return len(tensors)


def reference_arguments(card: ModelCard) -> dict[str, object]:
    """The reference's constructor arguments for a model: the inverse of `tcm.weights.edm_names.parse_arguments`."""
    channels, height, width = card.image_shape
    if height != width:
        raise TcmError(f"image_shape={card.image_shape} is not square, but the reference supports only square images")
    if card.preconditioning != USUAL:
        raise TcmError(
            f"preconditioning={card.preconditioning} cannot be exported: the reference has only EDM's; train with "
            'preconditioning = { kind = "edm" }'
        )
    return {
        "img_resolution": height,
        "img_channels": channels,
        "label_dim": class_count(card.condition),
        "sigma_data": card.sigma_data,
    } | card.network.published_arguments()
