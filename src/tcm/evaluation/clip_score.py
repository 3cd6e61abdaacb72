"""CLIP score: how well images fit their texts, in the eyes of a CLIP model from a local folder (the extra `t2i`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcm.data.decode import picture_of
from tcm.evaluation.features import weights_hash
from tcm.evaluation.scores import Score
from tcm.evaluation.sharing import gather_rows
from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.foundation.processes import Processes
from tcm.text.encoders import check_vocabulary, load_whole


@dataclass(frozen=True)
class Clip:
    """A CLIP model with what prepares its images and texts."""

    model: Any
    images: Any
    tokenizer: Any
    name: str
    hash: str

    @torch.no_grad()
    @fp32_products("ieee")
    def scores(self, images: Tensor, texts: Sequence[str]) -> Tensor:
        """max(100 cos, 0) of each uint8 image [n, C, H, W] and its text."""
        device = next(self.model.parameters()).device
        pictures = [picture_of(pixels.cpu().numpy()).convert("RGB") for pixels in images]
        pixels = self.images(images=pictures, return_tensors="pt")["pixel_values"].to(device)
        longest = self.model.config.text_config.max_position_embeddings
        words = self.tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        out = self.model(
            pixel_values=pixels,
            input_ids=words["input_ids"].to(device),
            attention_mask=words["attention_mask"].to(device),
        )
        cosines = torch.cosine_similarity(out.image_embeds, out.text_embeds)
        return (100 * cosines).clamp_min(0).cpu()


def load_clip(folder: str, device: torch.device) -> Clip:
    """A CLIP model from a folder that transformers' `save_pretrained` wrote, with its tokenizer and image processor."""
    try:
        import transformers as library
    except ImportError as error:
        raise TcmError(f"the CLIP score needs more packages; {how_to_install('t2i')}") from error
    transformers: Any = library
    if not Path(folder).is_dir():
        raise TcmError(
            f"--clip {folder} is not a folder; give one with a CLIP model, its tokenizer and image processor"
        )
    try:
        check_vocabulary(Path(folder))
        model = load_whole(transformers, transformers.CLIPModel, folder).to(device)
        images = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise TcmError(
            f"--clip {folder} holds no CLIP model that can be loaded ({reason}); check the folder"
        ) from error
    return Clip(model, images, tokenizer, Path(folder).name, weights_hash(model.state_dict()))


class ClipScore:
    """Collects the scores of images that pass by, each with its text."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        self._found: list[Tensor] = []

    def watching(self, images: Iterable[Tensor], texts: Sequence[str]) -> Iterator[Tensor]:
        """Yield the batches of images as they are."""
        start = 0
        for batch in images:
            self._found.append(self._clip.scores(batch, texts[start : start + len(batch)]))
            start += len(batch)
            yield batch

    def score(self, other: Score, processes: Processes, count: int) -> Score:
        """The mean over the `count` images of all processes, as a score of the same images as another one."""
        found = gather_rows(processes, torch.cat([torch.empty(0), *self._found]), count)
        return replace(
            other,
            kind="clip-score",
            metric="CLIP score",
            value=float(found.mean()),
            deviation=float(found.std() / len(found) ** 0.5),
            count=len(found),
            detector=self._clip.name,
            detector_hash=self._clip.hash,
            preprocessing="that of the CLIP folder",
            reference="the prompts",
            reference_hash="",
            reference_count=None,
            settings="mean of max(100 cos, 0)",
            note=None,
        )
