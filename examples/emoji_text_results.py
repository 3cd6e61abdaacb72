"""The results in docs/text-to-image.md: a picture, and a table that is written below the page's mark.

Run with `python examples/emoji_text_results.py runs/emoji-text docs/text-to-image.md` once the run has finished;
a number behind it limits the captions, to some that are always the same, from all over the data.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tcm.data import Dataset, open_dataset, to_uint8
from tcm.data.dataset import Indices
from tcm.data.grid import captioned_grid, save_picture
from tcm.evaluation.features import Detector, load_detector
from tcm.evaluation.generation import Sampling
from tcm.evaluation.prompts import Prompted, draw
from tcm.evaluation.references import chosen_images, observe, reference_of
from tcm.evaluation.retrieval import nearest_images
from tcm.foundation.files import write_text
from tcm.method.gaussians import frechet_distance
from tcm.weights import Model

MARK = "<!-- Below this line: written by examples/emoji_text_results.py. -->"
PICTURE = Path("images", "emoji-text.png")
DETECTOR = "efficientnet-lite0"
TRAINED = ["penguin", "slice of pizza", "sunflower", "grinning face", "soccer ball", "japan flag", "red apple", "crown"]
HELD_OUT = ["dolphin", "green apple", "large blue circle", "closed book", "broccoli", "india flag", "cat", "scorpius"]
STAGES = {"diffusion": "0-diffusion", "stage 1": "1-consistency", "stage 2": "2-truncated"}


@dataclass(frozen=True)
class Way:
    """One way to draw: a model and its steps."""

    name: str
    model: Model
    steps: int | None


def ways_of(run: Path, guidance: float) -> list[Way]:
    """The diffusion model with guidance, and both distilled models in one and two steps."""
    diffusion, *distilled = (Model.load(run / folder / "model") for folder in STAGES.values())
    ways = [Way(f"diffusion, guidance {guidance:g}, 18 Heun steps", diffusion.guided(guidance), 18)]
    for name, model in zip(list(STAGES)[1:], distilled, strict=True):
        ways += [Way(f"{name}, one step", model, 1), Way(f"{name}, two steps", model, 2)]
    return ways


def picture(ways: list[Way]) -> torch.Tensor:
    """Rows for trained and for held-out prompts: the data, then each way of drawing, from the same seeds."""
    rows = []
    for prompts, split in ((TRAINED, "train"), (HELD_OUT, "test")):
        data = open_dataset("emoji", split=split)
        texts = list(data.captions or ())
        rows.append(torch.from_numpy(data.pixels(np.array([texts.index(prompt) for prompt in prompts]))))
        rows += [to_uint8(way.model.sample(prompts=prompts, seed=0, steps=way.steps)) for way in ways]
    return torch.cat(rows)


def drawn_captions(way: Way, data: Dataset, chosen: Indices) -> list[torch.Tensor]:
    """An image for each of these captions of the data, the seeds counting up from 0."""
    captions = list(data.captions or ())
    wanted = [Prompted(captions[index], seed, "") for seed, index in enumerate(chosen.tolist())]
    return list(draw(way.model, wanted, Sampling(steps=way.steps), None, 64))


def row(way: Way, train: Dataset, test: Dataset, detector: Detector, count: int | None) -> str:
    """A line of the table: distance to the training images, and how often the nearest image is the right one."""
    reference = reference_of(train, "emoji", detector, keep=True)
    chosen, chosen_test = chosen_images(train.count, count), chosen_images(test.count, count)
    observed = observe(drawn_captions(way, train, chosen), detector, keep=True)
    held_out = observe(drawn_captions(way, test, chosen_test), detector, keep=True)
    own_gallery = reference_of(test, "emoji (test)", detector, keep=True).features
    assert observed.features is not None
    assert held_out.features is not None
    assert reference.features is not None
    assert own_gallery is not None
    found = nearest_images(observed.features, reference.features)
    right = np.mean(found == chosen)
    same = np.mean(classes(train)[found] == classes(train)[chosen])
    other = nearest_images(held_out.features, reference.features)
    held_same = np.mean(classes(train)[other] == classes(test)[chosen_test])
    held_right = np.mean(nearest_images(held_out.features, own_gallery) == chosen_test)
    distance = frechet_distance(observed.statistics, reference.statistics)
    return f"| {way.name} | {distance:.1f} | {right:.0%} | {same:.0%} | {held_right:.0%} | {held_same:.0%} |"


def classes(data: Dataset) -> np.ndarray:
    """The category of each emoji."""
    assert data.class_labels is not None
    return data.class_labels.values


def guessing(train: Dataset, asked: Dataset, count: int | None) -> str:
    """How often a training image drawn at random has a caption's category, and how many captions have the largest."""
    assert train.class_labels is not None
    names = train.class_labels.names
    shares = np.bincount(classes(train), minlength=len(names)) / train.count
    chosen = classes(asked)[chosen_images(asked.count, count)]
    of_captions = np.bincount(chosen, minlength=len(names)) / len(chosen)
    largest = int(of_captions.argmax())
    return f"{shares @ of_captions:.0%} by chance, {of_captions[largest]:.0%} by always naming {names[largest]}"


def main(run: Path, page: Path, count: int | None = None) -> None:
    """Draw, measure, and write the page."""
    ways = ways_of(run, 2.0)
    captions = [*TRAINED, *[""] * (len(ways) * len(TRAINED)), *HELD_OUT, *[""] * (len(ways) * len(HELD_OUT))]
    save_picture(page.parent / PICTURE, captioned_grid(picture(ways), captions, columns=len(TRAINED), scale=2))
    train, test, detector = open_dataset("emoji"), open_dataset("emoji", split="test"), load_detector(DETECTOR)
    rows = [row(way, train, test, detector, count) for way in ways]
    order = "; ".join(way.name for way in ways)
    above = page.read_text("utf-8").partition(MARK)[0]
    lines = [
        f"![the same prompts and seeds through each stage]({PICTURE.as_posix()})",
        "",
        f"From top to bottom: the emoji itself; {order}. The upper half are captions of the training data, the lower "
        "half captions that were kept out of it.",
        "",
        f"One image for each of {min(count or train.count, train.count):,} training captions and of the "
        f"{min(count or test.count, test.count)} that were held out. Distances are Fréchet distances to all training "
        f"images, in the features of {DETECTOR}; they grow as images get fewer. The nearest image is the nearest "
        "training image in these features; for a held-out caption, we look for the image with that caption among the "
        "held-out images. "
        f"The category would be right in {guessing(train, train, count)}; held out, in {guessing(train, test, count)}.",
        "",
        "| | distance | nearest has the caption | nearest has the category | held out: caption | held out: category |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    write_text(page, f"{above}{MARK}\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
