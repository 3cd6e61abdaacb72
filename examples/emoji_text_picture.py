"""The picture of docs/text-to-image.md: the same prompts and seeds through each stage of a run of `emoji-text`.

Run with `python examples/emoji_text_picture.py runs/emoji-text docs/images/emoji-text.png`.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from tcm.data import open_dataset, to_uint8
from tcm.data.grid import captioned_grid, save_picture
from tcm.weights import Model

TRAINED = ["penguin", "slice of pizza", "sunflower", "grinning face", "soccer ball", "japan flag", "red apple", "crown"]
HELD_OUT = ["dolphin", "green apple", "large blue circle", "closed book", "broccoli", "india flag", "cat", "scorpius"]
GUIDANCE = 2.0


def main(run: Path, out: Path) -> None:
    """Rows: the data, the diffusion model with guidance, stage 1 and stage 2, each for both lists of prompts."""
    diffusion = Model.load(run / "0-diffusion" / "model").guided(GUIDANCE)
    one_step = [Model.load(run / stage / "model") for stage in ("1-consistency", "2-truncated")]
    rows, captions = [], []
    for prompts, split in ((TRAINED, "train"), (HELD_OUT, "test")):
        data = open_dataset("emoji", split=split)
        texts = list(data.captions or ())
        rows.append(torch.from_numpy(data.pixels(np.array([texts.index(prompt) for prompt in prompts]))))
        rows += [to_uint8(model.sample(prompts=prompts, seed=0)) for model in (diffusion, *one_step)]
        captions += [*prompts, *[""] * (3 * len(prompts))]
    save_picture(out, captioned_grid(torch.cat(rows), captions, columns=len(TRAINED), scale=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
