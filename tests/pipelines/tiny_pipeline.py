"""A whole Stable Diffusion pipeline, real but for its size: made from configs, without any download."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

UNET = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
    "sample_size": 8,
}


def tiny_pipeline(folder: Path, prediction: str = "epsilon") -> Path:
    """Write the pipeline's folder: latents [4, 8, 8] of images [3, 64, 64], texts of at most 16 tokens."""
    torch.manual_seed(1)
    StableDiffusionPipeline(
        vae=tiny_vae(),
        text_encoder=CLIPTextModel(_text_config()),
        tokenizer=tiny_tokenizer(folder.parent / f"{folder.name}-tokenizer"),
        unet=UNet2DConditionModel(**UNET, flip_sin_to_cos=True, freq_shift=0),
        scheduler=PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type=prediction,
            skip_prk_steps=True,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=64,
    )


def tiny_tokenizer(folder: Path) -> CLIPTokenizer:
    """Letters, each alone or at a word's end, and two merges."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = [*letters, *(f"{letter}</w>" for letter in letters), "re", "red</w>", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(known)}))
    (folder / "merges.txt").write_text("#version: 0.2\nr e\nre d</w>\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=16)


def _text_config() -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=56,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=54,
        eos_token_id=55,
        pad_token_id=55,
    )
