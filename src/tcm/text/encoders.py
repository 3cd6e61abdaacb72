"""Frozen text encoders: from texts to the embeddings that a network attends to (the extra `t2i`)."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tcm.foundation.devices import best_device, chosen_device, fp32_products
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.extras import how_to_install
from tcm.foundation.fetching import data_folder
from tcm.foundation.tensors import bounded_by, shapes_for_library
from tcm.method.conditions import TextEmbeddings
from tcm.text.pipeline_folders import find_pipeline

FETCHABLE = ("minilm",)
"""The encoders that `tcm text fetch` knows."""
AT_ONCE = 64
"""Texts that are encoded together."""
MOST_TOKENS = 512
"""A tokenizer without a limit of its own claims an astronomic one."""
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
PIPELINE_PARTS = ("text_encoder", "tokenizer")
"""The folders of a diffusers pipeline that make up its encoder."""


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer and a frozen model; which of its outputs count depends on what it was trained to be used for."""

    model: nn.Module
    tokenizer: Any
    reference: str
    sha256: str
    """Of the weights in float32 and the vocabulary."""
    width: int
    longest: int
    """The tokens that it takes at most, with those that mark the beginning and the end."""
    attends_to_padding: bool
    """CLIP as Stable Diffusion uses it: networks attend to all of its outputs, padding too."""

    def encode(self, texts: Sequence[str], tokens: int | None = None, *, warn: bool = True) -> TextEmbeddings:
        """The outputs for these texts, in `tokens` tokens each (all that the encoder takes); on the CPU, in float32.

        What is longer is cut, and a warning says where.
        """
        limit = self.longest if tokens is None else tokens
        if warn:
            self.warn_of_cuts(texts, limit)
        every = [*texts, ""]
        parts = [self._outputs(every[start : start + AT_ONCE], limit) for start in range(0, len(every), AT_ONCE)]
        outputs, mask = (torch.cat(some) for some in zip(*parts, strict=True))
        return TextEmbeddings(outputs[:-1], mask[:-1], outputs[-1], mask[-1], tuple(texts))

    def cut(self, text: str, tokens: int) -> str | None:
        """The part of a text that fits into so many tokens; None if all of it does."""
        whole = self.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        if len(whole) <= tokens:
            return None
        kept = self.tokenizer(text, add_special_tokens=True, truncation=True, max_length=tokens)["input_ids"]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True)).strip()

    def warn_of_cuts(self, texts: Sequence[str], tokens: int) -> None:
        """Warn of the texts that are cut, and say where the first one is."""
        cuts = {text: kept for text in dict.fromkeys(texts) if (kept := self.cut(text, tokens)) is not None}
        if not cuts:
            return
        text, kept = next(iter(cuts.items()))
        many = f" ({len(cuts) - 1} other prompts are cut too)"
        others = {1: "", 2: " (another prompt is cut too)"}.get(len(cuts), many)
        warnings.warn(
            f"the prompt {_shortened(text)!r} is longer than the {tokens} tokens that the model takes: what follows "
            f"{_shortened(kept, tail=True)!r} has no effect{others}; shorten it",
            TcmWarning,
            stacklevel=4,
        )

    @torch.no_grad()
    @fp32_products("ieee")
    def _outputs(self, texts: list[str], tokens: int) -> tuple[Tensor, Tensor]:
        batch = self.tokenizer(texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
        device = next(self.model.parameters()).device
        attended, ids = batch["attention_mask"].to(device), batch["input_ids"].to(device)
        # Stable Diffusion's CLIP is called without a mask: its attention is causal, so that padding changes nothing.
        mask = None if self.attends_to_padding else attended
        outputs = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        counts = torch.ones_like(attended) if mask is None else attended
        return outputs.float().cpu(), counts.bool().cpu()


@lru_cache(maxsize=4)
def load_encoder(reference: str) -> TextEncoder:
    """An encoder by the name of a fetched one, a folder (also a diffusers pipeline's), or a hub id; loaded once.

    It is moved to the accelerator of this process, if there is one, in half precision there.
    """
    transformers = _library()
    model_path, tokenizer_path = _paths(reference)
    try:
        check_vocabulary(Path(tokenizer_path))
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise TcmError(
            f"{tokenizer_path} has no tokenizer that can be loaded ({_first_line(error)}); add its files, such as "
            "tokenizer.json"
        ) from error
    try:
        model = _text_model(transformers, model_path)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise TcmError(
            f"{model_path} has no text encoder that can be loaded ({_first_line(error)}); give a folder with its "
            "config.json and weights"
        ) from error
    if tokenizer.pad_token is None:
        raise TcmError(f"{tokenizer_path}: the tokenizer has no padding token; add one to its special tokens")
    digest = _hash(model, tokenizer)
    device = chosen_device(best_device().type)
    model = model.to(device) if device.type == "cpu" else model.to(device, torch.float16)
    config: Any = model.config
    positions = config.to_dict().get("max_position_embeddings", MOST_TOKENS)
    longest = min(int(tokenizer.model_max_length), int(positions), MOST_TOKENS)
    is_clip = config.model_type.startswith("clip")
    return TextEncoder(model, tokenizer, reference, digest, int(config.hidden_size), longest, is_clip)


def encoder_folder(name: str) -> Path:
    """Where a fetched encoder is kept."""
    return data_folder() / "text" / name


def _text_model(transformers: Any, path: str) -> nn.Module:
    """The encoder in float32, from safetensors alone; of CLIP only the part that reads texts."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    is_clip = config.model_type == "clip"
    loader = transformers.CLIPTextModel if is_clip else transformers.AutoModelForTextEncoding
    return load_whole(transformers, loader, path)


def load_whole(transformers: Any, loader: Any, path: str) -> nn.Module:
    """A frozen model in float32, from safetensors alone; ValueError if weights are missing that count.

    transformers itself would make up what is missing, and only print a report of it.
    """
    with _quiet(transformers), bounded_by(shapes_for_library(path), f"{path}/config.json"):
        loaded = loader.from_pretrained(
            path, trust_remote_code=False, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    model: nn.Module = loaded[0]
    missing = sorted(name for name in loaded[1]["missing_keys"] if "pooler" not in name)
    if missing:
        raise ValueError(f"its weights lack {missing[0]}")
    return model.eval().requires_grad_(False)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """While the block runs, transformers shows no progress and no reports."""
    logging = transformers.utils.logging
    level, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if progress:
            logging.enable_progress_bar()


def _paths(reference: str) -> tuple[str, str]:
    """Where the model and its tokenizer are: a folder each in a pipeline, else one for both."""
    if reference in FETCHABLE:
        folder = encoder_folder(reference)
        if not folder.is_dir():
            raise TcmError(f"the text encoder {reference} is not on this machine yet; run `tcm text fetch {reference}`")
        return str(folder), str(folder)
    folder = find_pipeline(reference) or Path(reference)
    if not folder.is_dir():
        if reference.count("/") != 1 or reference.startswith((".", "/", "~")):
            raise TcmError(
                f"{reference} is not a folder with a text encoder; give such a folder, a hub id such as owner/name, or "
                f"{', '.join(FETCHABLE)}; if it was moved, correct condition.encoder in the model's config.json or in "
                "the recipe"
            )
        return reference, reference
    parts = [folder / part for part in PIPELINE_PARTS]
    if parts[0].is_dir():
        if not parts[1].is_dir():
            raise TcmError(
                f"{folder} has a folder text_encoder, but no tokenizer; copy that folder from the pipeline too"
            )
        return str(parts[0]), str(parts[1])
    return str(folder), str(folder)


def check_vocabulary(folder: Path) -> None:
    """Refuse a folder without a vocabulary: transformers would make up an empty one."""
    if folder.is_dir() and not any((folder / name).is_file() for name in VOCABULARIES):
        raise ValueError("no vocabulary")


def _hash(model: nn.Module, tokenizer: Any) -> str:
    """SHA-256 of the weights and the vocabulary, however they are stored."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.contiguous().view(torch.uint8).numpy().data if tensor.ndim else str(tensor.item()).encode()
        )
    return digest.hexdigest()


def _shortened(text: str, tail: bool = False) -> str:
    """The beginning, or the end, of a long text."""
    if len(text) <= 40:
        return text
    return f"…{text[-39:]}" if tail else f"{text[:39]}…"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise TcmError(f"text encoders need more packages; {how_to_install('t2i')}") from error
    return transformers
