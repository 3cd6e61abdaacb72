"""Our text-to-image models as Stable Diffusion pipelines, which unmodified diffusers runs in one step or two."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.files import new_folder, read_regular
from tcm.foundation.randomness import SampleStreams
from tcm.method.sampling import ConsistencySampler
from tcm.networks.diffusers_unet import DiffusersUNet, NoiseSchedule
from tcm.text.condition import Texts
from tcm.text.pipeline_folders import INDEX_FILE, find_pipeline
from tcm.weights.card import ModelCard
from tcm.weights.exported_origin import ORIGIN_KEY, origin_of
from tcm.weights.model import Model
from tcm.weights.pipelines import UNET_FILE

COPIED = ("vae", "text_encoder", "tokenizer")
LORA_FOLDER = "lora"
PROMPT = "a red cat"
"""What the exported pipeline is tried with."""
BOUND = 1e-3
"""The largest difference from our image, in [−1, 1], at which a folder is written."""
ROUNDING = 1e-5
"""Relative differences of noise levels that come from writing them in decimals."""
EXACT = 1e6
"""LCMScheduler's timestep_scaling: with it, its own c_skip and c_out are 0 and 1 at all times but 0."""


def export_pipeline(model: Model, folder: Path) -> float:
    """Write a pipeline's folder: the UNet, LCMScheduler, and copies of the text encoder, tokenizer and autoencoder.

    A LoRA is merged into the UNet, and also written by itself, as diffusers loads it. Returns the largest difference
    between an image by the folder's pipeline and ours.
    """
    model.card.check_alone("a pipeline")
    network, source = model.denoiser.network, _source(model)
    assert isinstance(network, DiffusersUNet), "checked"
    if folder.exists():
        raise TcmError(f"{folder} exists; name a new folder")
    with new_folder(folder) as aside:
        for part in COPIED:
            shutil.copytree(source / part, aside / part)
        _write_unet(network, model.card, aside / "unet")
        _scheduler(network.config.noise, network.config.prediction).save_pretrained(aside / "scheduler")
        _write_index(source, aside)
        if network.config.lora is not None:
            _write_lora(network, aside / LORA_FOLDER)
        (aside / "README.md").write_text(_readme(model, network), encoding="utf-8")
        return _compared(model, aside)


@fp32_products("ieee")
def _compared(model: Model, folder: Path) -> float:
    """The largest difference between one image by the pipeline in a folder and ours; too large a one is an error."""
    from diffusers import StableDiffusionPipeline

    model.to("cpu")
    # Encoded once: on an accelerator our text encoder computes in half precision, the pipeline's here does not.
    texts = _texts_of(model).encode([PROMPT])
    ours = model.sample(1, condition=texts)
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    noise = SampleStreams([0]).normal(model.card.image_shape)
    made = pipeline(
        prompt_embeds=texts.tokens, num_inference_steps=1, guidance_scale=1.0, latents=noise, output_type="pt"
    ).images
    difference = float((2 * made - 1 - ours).abs().max())
    if not difference <= BOUND:
        raise TcmError(
            f"{folder}: the exported pipeline differs from the model by {difference:.1e}; please report this"
        )
    return difference


def timestep_of(noise: NoiseSchedule, t: float, lowest: float = 0.0) -> int:
    """The integer timestep whose noise is nearest to t, in ln σ, of those with σ ≥ `lowest`.

    >>> [timestep_of(NoiseSchedule(), t) for t in (0.5, 1.0, 2.0)], timestep_of(NoiseSchedule(), 2.0, lowest=2.0)
    ([169, 354, 562], 563)
    """
    sigmas = noise.sigmas()
    distances = (sigmas.log() - torch.tensor(t, dtype=torch.float64).log()).abs()
    return int(distances.where(sigmas >= lowest * (1 - ROUNDING), torch.inf).argmin())


def _texts_of(model: Model) -> Texts:
    kind = model.card.condition
    assert isinstance(kind, Texts), "the UNet takes nothing else"
    return kind


def _source(model: Model) -> Path:
    """The folder of the pipeline that the model's texts and images go through."""
    card = model.card
    if not isinstance(model.denoiser.network, DiffusersUNet) or card.latents is None:
        raise TcmError(
            f"network.kind={card.network.kind!r} is not a Stable Diffusion UNet, and only these become a pipeline"
        )
    if not isinstance(card.sampler, ConsistencySampler):
        raise TcmError(
            f"this is a {card.sampler.model} model, which needs many steps; export the consistency model made from it"
        )
    found = find_pipeline(card.latents.vae)
    if found is None:
        raise TcmError(f"{card.latents.vae}, the pipeline that the model was made from, cannot be found; restore it")
    return found


def _write_unet(network: DiffusersUNet, card: ModelCard, folder: Path) -> None:
    """The UNet as diffusers reads it; the file's metadata says which consistency model it is, for us to read."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**network.config.arguments)
    unet.save_config(folder)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in network.merged().items()}
    origin = origin_of(card)
    assert origin is not None, "its sampler was checked"
    save_file(tensors, folder / UNET_FILE, metadata={"format": "pt", ORIGIN_KEY: origin.model_dump_json()})


def _scheduler(noise: NoiseSchedule, prediction: str) -> Any:
    from diffusers import LCMScheduler

    return LCMScheduler(
        num_train_timesteps=noise.timesteps,
        beta_start=noise.beta_start,
        beta_end=noise.beta_end,
        beta_schedule=noise.beta_schedule,
        prediction_type=prediction,
        timestep_scaling=EXACT,
        original_inference_steps=noise.timesteps,  # so that each timestep can be the second
        steps_offset=1,  # of no effect here, but the pipeline warns of anything else
    )


def _write_index(source: Path, folder: Path) -> None:
    """The source's model_index.json with our scheduler, and without the parts that are left out."""
    index = json.loads(read_regular(source / INDEX_FILE))
    left_out = ("safety_checker", "feature_extractor", "image_encoder")
    index |= {part: [None, None] for part in left_out} | {"requires_safety_checker": False}
    index |= {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "LCMScheduler"]}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_lora(network: DiffusersUNet, folder: Path) -> None:
    from diffusers import StableDiffusionPipeline
    from peft import get_peft_model_state_dict

    lora = network.config.lora
    assert lora is not None, "the caller checked"
    # Loaders that know no alpha take alpha = rank: the factor alpha/rank becomes part of the weights.
    layers = {
        name: tensor.detach().cpu() * (lora.alpha / lora.rank if "lora_B" in name else 1)
        for name, tensor in get_peft_model_state_dict(network.unet).items()
    }
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)


def _readme(model: Model, network: DiffusersUNet) -> str:
    """How to run the folder in one step and in two."""
    sampler, noise = model.sampler, network.config.noise
    assert isinstance(sampler, ConsistencySampler), "checked"
    first = noise.timesteps - 1
    wanted = max(sampler.second_time, model.card.t_min)
    second = timestep_of(noise, wanted, model.card.t_min)
    sigma = float(noise.sigmas()[second])
    exact = abs(sigma / wanted - 1) < ROUNDING
    between = "" if exact else BETWEEN.format(wanted=wanted, second=second, sigma=sigma)
    came = model.card.provenance
    lora = LORA_README if network.config.lora is not None else ""
    return README.format(
        recipe=came.recipe or "unknown",
        stage=came.stage or "unknown",
        first=first,
        second=second,
        between=between,
        lora=lora,
    )


README = """# A one-step text-to-image model

Trained with truncated-consistency (recipe {recipe}, stage {stage}); it runs in diffusers as it is.

```python
from diffusers import StableDiffusionPipeline

pipeline = StableDiffusionPipeline.from_pretrained("this folder")
image = pipeline("a red cat", num_inference_steps=1, guidance_scale=1.0).images[0]
```

Two steps, with the second at timestep {second}:

```python
image = pipeline("a red cat", timesteps=[{first}, {second}], guidance_scale=1.0).images[0]
```
{between}
Guidance is part of the training: leave `guidance_scale` at 1.0.
{lora}"""

BETWEEN = """
The model's own second time, {wanted:.6g}, lies between two timesteps. Timestep {second}, σ = {sigma:.6g}, is the
nearest that the model was trained for: with it, two-step images differ a little from those of `tcm sample --steps 2`.
"""

LORA_README = """
The folder `lora` holds only the trained low-rank changes, for the pipeline that they were trained on:

```python
pipeline.load_lora_weights("this folder/lora")
```

Use `LCMScheduler` with `timestep_scaling=1e6` there, as in `scheduler/scheduler_config.json`.
"""
