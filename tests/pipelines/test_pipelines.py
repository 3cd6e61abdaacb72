"""Pipelines as teachers and as exports: the same images as diffusers' own samplers and unmodified pipelines give."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    StableDiffusionPipeline,
)
from torch import Tensor

import tcm
from tcm import ConsistencySampler, Model, SampleStreams
from tcm.data import ArrayDataset, to_float
from tcm.data.latents import seen_by
from tcm.evaluation.denoising import model_denoise
from tcm.evaluation.features import load_detector
from tcm.evaluation.generation import quantise
from tcm.evaluation.references import reference_of
from tcm.foundation.errors import TcmError
from tcm.method.sampling import heun_steps, last
from tcm.method.solvers import euler, guided
from tcm.networks.diffusers_unet import ADAPTER, Lora, NoiseSchedule
from tcm.report.drawing import PATHS, interpolate, path_from_noise
from tcm.text.autoencoders import Latents, load_autoencoder
from tcm.text.encoders import load_encoder
from tcm.text.pipeline_folders import find_pipeline
from tcm.weights import inspect
from tcm.weights.pipeline_export import LORA_FOLDER, export_pipeline, timestep_of

PROMPTS, SHAPE = ["red cat", "a blue dog"], (4, 8, 8)
CLOSE = 1e-4


def loaded(folder: Path) -> StableDiffusionPipeline:
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def noise(seed: int = 0) -> Tensor:
    """The first noise of our images 0 and 1."""
    return SampleStreams([seed, seed + 1]).normal(SHAPE)


@pytest.mark.parametrize(("kind", "guidance"), [("pipeline", 1.0), ("pipeline", 6.0), ("v_pipeline", 6.0)])
def test_heun_as_diffusers(request: pytest.FixtureRequest, kind: str, guidance: float) -> None:
    """Our sampler of a diffusion model, 20 steps, against diffusers' on the same grid."""
    folder = request.getfixturevalue(kind)
    model, pipeline = tcm.load(folder), loaded(folder)
    pipeline.scheduler = HeunDiscreteScheduler.from_config(
        pipeline.scheduler.config, use_karras_sigmas=True, timestep_spacing="linspace"
    )
    options = {"guidance_scale": guidance, "latents": noise(), "output_type": "latent", "negative_prompt": ["fog"] * 2}
    theirs = pipeline(PROMPTS, num_inference_steps=20, **options).images
    condition = replace(model.card.condition, negative="fog").encode(PROMPTS)
    ours = last(heun_steps(model.denoiser, 20, SampleStreams([0, 1]), condition, guidance))
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=CLOSE)


def test_ddim_is_euler(pipeline: Path) -> None:
    """DDIM's 20 steps are Euler's in σ, from timestep to timestep, with guidance 6 away from the empty prompt."""
    model, theirs = tcm.load(pipeline), loaded(pipeline)
    theirs.scheduler = DDIMScheduler.from_config(theirs.scheduler.config, clip_sample=False, set_alpha_to_one=True)
    theirs.scheduler.set_timesteps(20)
    sigmas = NoiseSchedule().sigmas()[theirs.scheduler.timesteps]
    expected = theirs(PROMPTS, num_inference_steps=20, guidance_scale=6.0, latents=noise(), output_type="latent").images
    denoise = guided(model.denoiser, model.card.condition.encode(PROMPTS), 6.0)
    x = float(1 + sigmas[0] ** 2) ** 0.5 * noise()
    with torch.no_grad():
        for t, r in zip(sigmas, [*sigmas[1:], torch.tensor(0.0)], strict=True):
            x = euler(denoise, x, t.repeat(2), r.repeat(2))
    torch.testing.assert_close(x, expected, atol=CLOSE, rtol=CLOSE)


def student(folder: Path, lora: Lora | None = None) -> Model:
    """A consistency model whose weights are somewhere near the pipeline's; its second step is at timestep 354."""
    teacher = tcm.load(folder)
    network = teacher.card.network.model_copy(update={"lora": lora})
    second = float(network.noise.sigmas()[354])
    fields = {"kind": "consistency", "network": network}
    fields["sampler"] = network.sampled_by(ConsistencySampler(second_time=second))
    model = Model.fresh(teacher.card.model_copy(update=fields))
    own = model.denoiser.network
    own.load_state_dict(own.starting_from(teacher.denoiser.network.state_dict()))
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if lora is None or ADAPTER in name:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("kind", "lora"), [("pipeline", None), ("v_pipeline", None), ("pipeline", Lora(rank=4, alpha=8))]
)
def test_export_runs_in_diffusers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lora: Lora | None
) -> None:
    """One step and two, by the unmodified pipeline in the exported folder, are our images."""
    source, folder = request.getfixturevalue(kind), tmp_path / "exported"
    model = student(source, lora)
    assert export_pipeline(model, folder) < CLOSE
    exported = loaded(folder)
    options = {"guidance_scale": 1.0, "latents": noise(), "output_type": "pt"}
    one = model.sample(prompts=PROMPTS)
    assert one.shape == (2, 3, 64, 64)
    torch.testing.assert_close(
        2 * exported(PROMPTS, num_inference_steps=1, **options).images - 1, one, atol=CLOSE, rtol=CLOSE
    )
    # The pipeline draws the noise between its steps itself: it is given ours.
    streams = SampleStreams([0, 1])
    _, between = streams.normal(SHAPE), streams.normal(SHAPE)
    monkeypatch.setattr("diffusers.schedulers.scheduling_lcm.randn_tensor", lambda *_, **__: between)
    two = 2 * exported(PROMPTS, timesteps=[999, 354], **options).images - 1
    torch.testing.assert_close(two, model.sample(prompts=PROMPTS, steps=2), atol=CLOSE, rtol=CLOSE)
    assert not torch.allclose(one, two, atol=1e-2)
    assert "timesteps=[999, 354]" in (folder / "README.md").read_text()
    assert (folder / LORA_FOLDER).exists() == (lora is not None)
    with pytest.raises(TcmError, match="exported exists; name a new folder"):
        export_pipeline(model, folder)
    if lora is not None:
        tuned = loaded(source)
        tuned.load_lora_weights(folder / LORA_FOLDER)
        tuned.scheduler = LCMScheduler.from_pretrained(folder / "scheduler")
        found = 2 * tuned(PROMPTS, num_inference_steps=1, **options).images - 1
        torch.testing.assert_close(found, one, atol=CLOSE, rtol=CLOSE)


def test_an_image_does_not_depend_on_its_batch(pipeline: Path) -> None:
    model = student(pipeline)
    together, alone = model.sample(prompts=PROMPTS), model.sample(prompts=PROMPTS[1], seed=1, count=1)
    torch.testing.assert_close(alone[0], together[1], atol=CLOSE, rtol=CLOSE)


def test_an_encoder_in_half_precision_does_not_fail_the_export(pipeline: Path, tmp_path: Path) -> None:
    """As it is on an accelerator: both sides are given the same embeddings, on which this model depends strongly."""
    model = student(pipeline)
    with torch.no_grad():
        for name, parameter in model.denoiser.named_parameters():
            if name.endswith(("attn2.to_v.weight", "attn2.to_out.0.weight")):
                parameter.mul_(30)
    encoder = load_encoder(str(pipeline))
    try:
        encoder.model.half()
        assert export_pipeline(model, tmp_path / "exported") < CLOSE
    finally:
        load_encoder.cache_clear()


def test_a_second_time_between_two_timesteps(pipeline: Path, tmp_path: Path) -> None:
    """The timestep is one that the model was trained for, though another is nearer; the folder says so."""
    model = student(pipeline)
    t_min, sampler = 2.0, replace(model.card.sampler, second_time=2.0)
    card = model.card.model_copy(update={"sampler": sampler, "t_min": t_min})
    export_pipeline(replace(model, card=card), tmp_path / "exported")
    sigmas = NoiseSchedule().sigmas()
    assert sigmas[562] < t_min < sigmas[563]
    text = (tmp_path / "exported" / "README.md").read_text()
    assert "timesteps=[999, 563]" in text
    assert "second time, 2, lies between two timesteps. Timestep 563, σ = 2.00497, is the\nnearest" in text
    export_pipeline(student(pipeline), tmp_path / "exact")
    assert "between two timesteps" not in (tmp_path / "exact" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["pipeline", "v_pipeline"])
def test_an_export_is_read_back_as_the_model_that_it_is(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """Its method, sampler and times, also when its scheduler is replaced by that of a diffusion model."""
    trained = student(request.getfixturevalue(kind))
    card = trained.card.model_copy(update={"kind": "truncated", "t_min": 0.9, "t_max": 14.6146})
    model = Model.fresh(card)
    model.denoiser.load_state_dict(trained.denoiser.state_dict())
    export_pipeline(model, tmp_path / "exported")
    entry = {"scheduler": ["diffusers", "PNDMScheduler"]}
    for folder in (tmp_path / "exported", changed(tmp_path / "exported", tmp_path / "swapped", INDEX, **entry)):
        again = tcm.load(folder)
        assert again.card == card.model_copy(
            update={"latents": again.card.latents, "provenance": again.card.provenance}
        )
        assert again.card.latents.vae_hash == card.latents.vae_hash
        assert inspect(folder) == again.card
        for steps in (1, 2):
            assert torch.equal(again.sample(prompts=PROMPTS, steps=steps), model.sample(prompts=PROMPTS, steps=steps))


def test_few_step_models_of_others_are_refused(pipeline: Path, tmp_path: Path) -> None:
    """Their UNets are no diffusion models; diffusers saves an export of ours without the note that says what it is."""
    export_pipeline(student(pipeline), tmp_path / "exported")
    loaded(tmp_path / "exported").save_pretrained(tmp_path / "saved")
    lcm, tcd = {"_class_name": "LCMScheduler"}, {"scheduler": ["diffusers", "TCDScheduler"]}
    for folder, scheduler in (
        (tmp_path / "saved", "LCMScheduler"),
        (changed(pipeline, tmp_path / "lcm", SCHEDULER, **lcm), "LCMScheduler"),
        (changed(pipeline, tmp_path / "tcd", INDEX, **tcd), "TCDScheduler"),
        (changed(tmp_path / "lcm", tmp_path / "dreamshaper", UNET_CONFIG, time_cond_proj_dim=256), "LCMScheduler"),
    ):
        for read in (inspect, tcm.load):
            with pytest.raises(TcmError, match=rf"is made for {scheduler}, .* the model folder that this one was"):
                read(folder)


def test_what_cannot_be_exported(pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(TcmError, match="is a diffusion model, which needs many steps"):
        export_pipeline(tcm.load(pipeline), tmp_path / "out")
    with pytest.raises(TcmError, match="is not a Stable Diffusion UNet"):
        export_pipeline(tcm.load("digits"), tmp_path / "out")


def test_a_saved_model_is_the_same(pipeline: Path, tmp_path: Path) -> None:
    """The folder of a text model names its pipeline; the same images come out of it."""
    model = student(pipeline, Lora(rank=2))
    model.save(tmp_path / "model")
    again = tcm.load(tmp_path / "model")
    assert again.card == model.card
    torch.testing.assert_close(again.sample(prompts=PROMPTS), model.sample(prompts=PROMPTS))
    assert inspect(tmp_path / "model").picture_shape == (3, 64, 64)


def test_a_pipeline_that_was_moved(pipeline: Path, tmp_path: Path) -> None:
    """The error names the key that says where it is; with the new folder the images are the same."""
    first, then = tmp_path / "first", tmp_path / "then"
    shutil.copytree(pipeline, first)
    student(first).save(tmp_path / "model")
    images = tcm.load(tmp_path / "model").sample(prompts=PROMPTS, steps=1)
    first.rename(then)
    config = tmp_path / "model" / "config.json"
    moved = json.loads(config.read_text())
    for part, key, loader in (("condition", "encoder", load_encoder), ("latents", "vae", load_autoencoder)):
        loader.cache_clear()
        with pytest.raises(TcmError, match=rf"if it was moved, correct {part}\.{key} in the model's config\.json"):
            tcm.load(tmp_path / "model").sample(prompts=PROMPTS, steps=1)
        moved[part][key] = str(then)
        config.write_text(json.dumps(moved))
    assert torch.equal(tcm.load(tmp_path / "model").sample(prompts=PROMPTS, steps=1), images)


def test_timesteps() -> None:
    assert [timestep_of(NoiseSchedule(), t) for t in (0.001, 0.5, 1.0, 2.0, 80.0)] == [0, 169, 354, 562, 999]
    assert timestep_of(NoiseSchedule(), 2.0, lowest=2.0) == 563
    lowest = float(NoiseSchedule().sigmas()[563])
    assert timestep_of(NoiseSchedule(), 1.0, lowest=round(lowest, 6)) == 563, "as a recipe writes it"


# Latents


def test_latents_are_the_means(pipeline: Path) -> None:
    vae = AutoencoderKL.from_pretrained(pipeline / "vae")
    latents, images = Latents.of(str(pipeline)), torch.rand(3, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        expected = vae.encode(images).latent_dist.mean * vae.config.scaling_factor
        back = vae.decode(expected / vae.config.scaling_factor).sample
    found = latents.encode(images)
    assert (found.dtype, found.shape) == (torch.float16, (3, *SHAPE))
    torch.testing.assert_close(found.float(), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(latents.decode(expected), back.clamp(-1, 1), atol=CLOSE, rtol=CLOSE)
    assert torch.equal(latents.encode(images[1:2]), found[1:2]), "an image's latents depend on the image alone"
    assert (latents.of_images((3, 64, 32)), latents.images_of((4, 8, 4))) == ((4, 8, 4), (3, 64, 32))
    for shape in ((1, 64, 64), (3, 60, 64)):
        with pytest.raises(TcmError, match="have no latents"):
            latents.of_images(shape)
    with pytest.raises(TcmError, match=r"has hash .* was made with 0000"):
        replace(latents, vae_hash="0000").encode(images)
    with pytest.raises(TcmError, match="has no autoencoder that can be loaded"):
        Latents.of(str(pipeline / "unet"))


# What a pipeline must be


def changed(source: Path, target: Path, file: str, **values: object) -> Path:
    """A copy of a pipeline with other values in one of its JSON files."""
    shutil.copytree(source, target)
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(content | values))
    return target


INDEX, UNET_CONFIG, SCHEDULER = "model_index.json", "unet/config.json", "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (
            INDEX,
            {
                "_class_name": "StableDiffusionXLPipeline",
                "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
            },
            "is a StableDiffusionXLPipeline with two text encoders",
        ),
        (
            INDEX,
            {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]},
            "is a StableDiffusion3Pipeline with a transformer",
        ),
        (
            INDEX,
            {"unet": ["diffusers", "UNet2DModel"]},
            "must name UNet2DConditionModel as unet, but it has UNet2DModel",
        ),
        (INDEX, {"tokenizer": [None, None]}, "must name CLIPTokenizer as tokenizer, but it lacks it"),
        (UNET_CONFIG, {"addition_embed_type": "text_time"}, "the UNet has addition_embed_type='text_time'"),
        (UNET_CONFIG, {"in_channels": 9}, "the UNet takes 9 channels and gives 4, as for inpainting"),
        (UNET_CONFIG, {"block_out_channels": "many"}, r"unet/config.json: block_out_channels"),
        (SCHEDULER, {"prediction_type": "sample"}, "prediction_type='sample' is not supported"),
        (SCHEDULER, {"rescale_betas_zero_snr": True}, "the scheduler has rescale_betas_zero_snr"),
        (SCHEDULER, {"beta_start": None}, "beta_start cannot be unset"),
        (SCHEDULER, {"beta_schedule": "squaredcos_cap_v2"}, r"other: scheduler/scheduler_config.json: beta_schedule"),
    ],
)
def test_other_pipelines(pipeline: Path, tmp_path: Path, file: str, values: dict, message: str) -> None:
    with pytest.raises(TcmError, match=message):
        inspect(changed(pipeline, tmp_path / "other", file, **values))


def test_missing_parts(pipeline: Path, tmp_path: Path) -> None:
    copy = changed(pipeline, tmp_path / "copy", INDEX)
    (copy / "unet" / "diffusion_pytorch_model.safetensors").rename(copy / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(TcmError, match=r"unet has only diffusion_pytorch_model.bin, a pickle, which could run code"):
        tcm.load(copy)
    (copy / "unet" / "diffusion_pytorch_model.bin").rename(copy / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(
        TcmError, match=r"unet has only diffusion_pytorch_model.fp16.safetensors, a variant; load .* and"
    ):
        tcm.load(copy)
    (copy / "unet" / "diffusion_pytorch_model.fp16.safetensors").rename(
        copy / "unet" / "diffusion_pytorch_model.safetensors"
    )
    shutil.rmtree(copy / "tokenizer")
    with pytest.raises(TcmError, match="has no folder tokenizer"):
        tcm.load(copy)
    (copy / "tokenizer").mkdir()
    with pytest.raises(TcmError, match="the folder tokenizer is empty"):
        tcm.load(copy)
    (copy / "tokenizer").rmdir()
    shutil.copytree(pipeline / "tokenizer", copy / "tokenizer")
    (copy / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"short")
    with pytest.raises(TcmError, match=r"is damaged .*download it again"):
        tcm.load(copy)
    (copy / INDEX).write_text("[]")
    with pytest.raises(TcmError, match=r"model_index.json is not a JSON object"):
        tcm.load(copy)


def test_from_the_hub(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id stands for the copy in the hub's cache, and stays in the card."""
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(pipeline, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = find_pipeline("someone/tiny")
    assert found is not None
    assert found.name == "abc"
    card = inspect("someone/tiny")
    assert (card.latents.vae, card.condition.encoder) == ("someone/tiny", "someone/tiny")
    assert find_pipeline("someone/else") is None
    assert find_pipeline("./not-there") is None
    with pytest.raises(TcmError, match="is neither a folder nor a model on the hub"):
        inspect("someone/else")


def test_without_diffusers(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(TcmError, match=r"diffusers pipelines need more packages.*\[t2i\]"):
        inspect(pipeline)


def test_what_a_report_draws_are_pictures(pipeline: Path) -> None:
    """Paths, strips and denoised data of a latent model are decoded; the data are encoded before they get noise."""
    model = student(pipeline)
    path = path_from_noise(model, 2)
    assert path.inputs.shape == path.outputs.shape == (2, PATHS, 3, 64, 64)
    assert torch.equal(path.outputs[-1], quantise(model.sample(steps=2, seeds=range(PATHS))))
    assert interpolate(model).shape[2:] == (3, 64, 64)
    images = ArrayDataset(np.random.default_rng(0).integers(0, 256, (2, 3, 64, 64), np.uint8))
    latents = seen_by(images, model.card.latents)
    assert seen_by(images, None) is images
    x = to_float(torch.from_numpy(latents.pixels(np.arange(2))))
    assert (latents.shape, x.shape) == (SHAPE, (2, *SHAPE))
    denoised = model_denoise(model)(x, torch.full((2,), 0.03), model.card.condition.encode(PROMPTS))
    assert denoised.shape == (2, 3, 64, 64)
    with pytest.raises(TcmError, match="not images to compare with"):
        reference_of(latents, "latents", load_detector("digits"))
