"""A diffusers pipeline, Stable Diffusion's, as a model: its UNet in our notation, its text encoder, its autoencoder."""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tcm.foundation.errors import TcmError, describe_validation
from tcm.foundation.extras import how_to_install, is_installed
from tcm.foundation.files import read_regular
from tcm.foundation.tensors import bounded_by, load_tensors, metadata_in, shapes_in, tensors_in
from tcm.networks.diffusers_unet import UNET_KEYS, DiffusersUNetConfig, NoiseSchedule
from tcm.text.autoencoders import Latents
from tcm.text.condition import Texts
from tcm.text.encoders import load_encoder
from tcm.text.pipeline_folders import INDEX_FILE
from tcm.weights.card import ModelCard
from tcm.weights.exported_origin import Origin, read_origin
from tcm.weights.model import Model

SUPPORTED = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
"""The parts that a pipeline must have, and the classes that they can be of."""
OTHER_PARTS = {"transformer": "a transformer", "text_encoder_2": "two text encoders (SDXL)", "prior": "a prior"}
SCHEDULER_FILE = "scheduler/scheduler_config.json"
UNET_FILE = "diffusion_pytorch_model.safetensors"
PREFIX = "network.unet."
"""Of the UNet's tensors in our denoiser."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's folder, checked to be of a kind that we know; `name` is what the user called it."""

    folder: Path
    name: str
    network: DiffusersUNetConfig
    origin: Origin
    """What its UNet is: a diffusion model, or the consistency model that we exported."""

    def card(self) -> ModelCard:
        """The card of its UNet; texts and images are those of its own encoders."""
        size = self.network.sample_size
        try:
            return ModelCard(
                kind=self.origin.kind,
                sampler=self.network.sampled_by(self.origin.sampler),
                network=self.network,
                image_shape=(self.network.in_channels, size, size),
                condition=Texts.of(load_encoder(self.name)),
                latents=Latents.of(self.name),
                sigma_data=1.0,
                t_min=self.origin.t_min,
                t_max=self.origin.t_max,
                provenance=self.origin.provenance.model_copy(update={"imported_from": self.name}),
            )
        except ValidationError as error:
            raise describe_validation(error, self.name, ModelCard) from error

    def model(self) -> Model:
        """The UNet with its weights; nothing is unpickled."""
        path, card = self.folder / "unet" / UNET_FILE, self.card()
        with bounded_by(shapes_in(path).values(), f"{self.name}: unet/config.json"), torch.device("meta"):
            model = Model.fresh(card)
        load_tensors(
            model.denoiser, {f"{PREFIX}{name}": tensor for name, tensor in tensors_in(path).items()}, str(path)
        )
        return model


def read_pipeline(folder: Path, name: str) -> Pipeline:
    """The pipeline in a folder, without its weights; an error that says why if it is of a kind that we do not know."""
    if not is_installed("t2i"):
        raise TcmError(f"diffusers pipelines need more packages; {how_to_install('t2i')}")
    index = _read_json(folder / INDEX_FILE)
    for part, what in OTHER_PARTS.items():
        if _class_of(index, part) is not None:
            raise TcmError(
                f"{name} is a {index.get('_class_name')} with {what}, which is not supported; give a Stable Diffusion "
                "1 or 2 pipeline (UNet2DConditionModel, AutoencoderKL, CLIP)"
            )
    for part, classes in SUPPORTED.items():
        found = _class_of(index, part)
        if found not in classes:
            said = "lacks it" if found is None else f"has {found}"
            raise TcmError(
                f"{name}: {INDEX_FILE} must name {classes[0]} as {part}, but it {said}; give another pipeline"
            )
        if not (folder / part).is_dir():
            raise TcmError(f"{name} has no folder {part}, which {INDEX_FILE} names; download the pipeline again")
    _check_weights(folder, name)
    scheduler = _read_json(folder / SCHEDULER_FILE)
    schedulers = {str(one) for one in (_class_of(index, "scheduler"), scheduler.get("_class_name")) if one is not None}
    origin, network = _origin(folder, name, schedulers), _network(folder, name, scheduler)
    sigmas = network.noise.sigmas()
    diffusion = Origin(kind="diffusion", t_min=float(sigmas[0]), t_max=float(sigmas[-1]))
    return Pipeline(folder, name, network, origin or diffusion)


def _origin(folder: Path, name: str, schedulers: Set[str]) -> Origin | None:
    """What an export of ours says of itself; None for a diffusion model. Other people's few-step models are refused."""
    from diffusers.schedulers import KarrasDiffusionSchedulers

    path = folder / "unet" / UNET_FILE
    origin = read_origin(metadata_in(path), path)
    if origin is None and (other := sorted(schedulers - KarrasDiffusionSchedulers.__members__.keys())):
        raise TcmError(
            f"{name} is made for {other[0]}, so its UNet is no diffusion model, as others distil them; give a "
            "diffusion pipeline, or the model folder that this one was exported from"
        )
    return origin


def _network(folder: Path, name: str, scheduler: Mapping[str, Any]) -> DiffusersUNetConfig:
    """The UNet's config in our words; what we have no word for must be as diffusers has it by default."""
    given = {key: value for key, value in _read_json(folder / "unet" / "config.json").items() if key[0] != "_"}
    usual = _defaults()
    for key, value in given.items():
        if key not in UNET_KEYS and key in usual and _listed(usual[key]) != _listed(value):
            raise TcmError(f"{name}: the UNet has {key}={value!r}, which is not supported; only {usual[key]!r} is")
    keys = {key: given.get(key, usual[key]) for key in UNET_KEYS}
    if keys["in_channels"] != keys["out_channels"]:
        raise TcmError(
            f"{name}: the UNet takes {keys['in_channels']} channels and gives {keys['out_channels']}, as for "
            "inpainting, depth or editing, which is not supported; give a pipeline that takes only texts"
        )
    try:
        return DiffusersUNetConfig.model_validate(keys | _training(scheduler, name))
    except ValidationError as error:
        raise describe_validation(error, f"{name}: unet/config.json", DiffusersUNetConfig) from error


def _training(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the scheduler says about how the UNet was trained."""
    for key in ("trained_betas", "rescale_betas_zero_snr"):
        if said.get(key):
            raise TcmError(f"{name}: the scheduler has {key}, which is not supported; give another pipeline")
    prediction = said.get("prediction_type", "epsilon")
    if prediction not in ("epsilon", "v_prediction"):
        raise TcmError(f"{name}: prediction_type={prediction!r} is not supported; epsilon and v_prediction are")
    names = {"num_train_timesteps": "timesteps"} | {key: key for key in ("beta_start", "beta_end", "beta_schedule")}
    noise = {ours: said.get(theirs) for theirs, ours in names.items()}
    try:
        return {"prediction": prediction, "noise": NoiseSchedule.model_validate(noise)}
    except ValidationError as error:
        raise describe_validation(error, f"{name}: {SCHEDULER_FILE}", NoiseSchedule) from error


def _check_weights(folder: Path, name: str) -> None:
    """The weights must be safetensors: pickles are not read."""
    for part in ("unet", "vae", "text_encoder"):
        found = sorted(path.name for path in (folder / part).glob("*.safetensors"))
        if any(file.count(".") == 1 for file in found):
            continue
        if found:
            raise TcmError(
                f"{name}: {part} has only {found[0]}, a variant; load the pipeline in diffusers with its variant, and "
                "save it again without one"
            )
        pickles = sorted(path.name for path in (folder / part).glob("*.bin"))
        has = f"only {pickles[0]}, a pickle, which could run code" if pickles else "no weights"
        raise TcmError(f"{name}: {part} has {has}; give a pipeline with safetensors")
    if not any((folder / "tokenizer").iterdir()):
        raise TcmError(f"{name}: the folder tokenizer is empty; download the pipeline again")


def _class_of(index: Mapping[str, Any], part: str) -> str | None:
    """The class that a pipeline's index names for a part; null, twice, stands for none."""
    entry = index.get(part)
    return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None else None


def _defaults() -> dict[str, Any]:
    """What diffusers takes for keys that a UNet's config leaves out."""
    from inspect import Parameter, signature

    from diffusers import UNet2DConditionModel

    arguments = signature(UNet2DConditionModel.__init__).parameters.values()
    return {one.name: one.default for one in arguments if one.default is not Parameter.empty}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TcmError(f"{path} cannot be read ({error}); download the pipeline again") from error
    if not isinstance(content, dict):
        raise TcmError(f"{path} is not a JSON object; download the pipeline again")
    return content
