"""Real text encoders and CLIP models, a few thousand parameters each, built from their configs."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tcm.text.condition import Texts
from tcm.text.encoders import load_encoder

WORDS = [
    *("a", "the", "red", "green", "blue", "white", "black", "apple", "circle", "square", "cat", "dog", "on", "of"),
    *("with", "big", "small"),
]
LONGEST = 12


def save_tokenizer(folder: Path, longest: int = LONGEST) -> None:
    """Words as tokens, between a beginning and an end."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **names).save_pretrained(folder)


def save_encoder(folder: Path, seed: int = 0, width: int = 16) -> Path:
    """A BERT of one layer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=4 + len(WORDS), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_clip(folder: Path, seed: int = 0) -> Path:
    """A CLIP for images of 16 × 16."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 4 + len(WORDS), "max_position_embeddings": LONGEST}
    text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    CLIPImageProcessor(**size).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def texts(folder: Path, tokens: int = LONGEST) -> Texts:
    """The kind of texts that this encoder reads."""
    return Texts.of(load_encoder(str(folder)), tokens)


def write_images(folder: Path, count: int, size: int = 8) -> list[str]:
    """PNGs of one colour each; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{index:03d}.png" for index in range(count)]
    for index, name in enumerate(names):
        Image.fromarray(np.full((size, size, 3), index * 7 % 256, np.uint8)).save(folder / name)
    return names
