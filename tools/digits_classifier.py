"""Train the classifier whose features measure the digits: `python tools/digits_classifier.py OUT.safetensors`.

It learns from the bundled digits, each time with the same result.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from tcm.data import open_dataset
from tcm.evaluation.digits import DigitsClassifier

HELD_OUT = 0.2


@dataclass(frozen=True)
class Trained:
    """A classifier and the share of held-out images that it names correctly."""

    network: DigitsClassifier
    accuracy: float
    held_out: int


def split(count: int) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the held-out images: every fifth of a fixed permutation is held out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held_out = round(count * HELD_OUT)
    return order[held_out:], order[:held_out]


def train(images: Tensor, labels: Tensor, epochs: int = 20, batch: int = 64) -> Trained:
    """Train on uint8 images [n, 1, 8, 8]; same input, same weights."""
    pixels = images.float() / 127.5 - 1
    training, held_out = split(len(pixels))
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        network = DigitsClassifier()
    rounds = epochs * (len(training) // batch)
    optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, rounds)
    for step in range(rounds):
        if step % (len(training) // batch) == 0:
            order = training[torch.randperm(len(training), generator=generator)]
        at = step % (len(training) // batch) * batch
        chosen = order[at : at + batch]
        loss = functional.cross_entropy(network(pixels[chosen]), labels[chosen], label_smoothing=0.1)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        correct = network(pixels[held_out]).argmax(1) == labels[held_out]
    return Trained(network.eval(), float(correct.float().mean()), len(held_out))


def main(target: Path) -> None:
    """Train on the bundled digits and write the weights; one thread, so that sums are always taken in one order."""
    torch.set_num_threads(1)
    dataset = open_dataset("digits")
    images, labels = dataset.pixels(np.arange(dataset.count)), dataset.class_labels
    assert labels is not None
    trained = train(torch.from_numpy(images), torch.from_numpy(labels.values))
    save_file(trained.network.state_dict(), target)
    print(f"{target}: {trained.accuracy:.2%} of {trained.held_out} held-out digits named correctly")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
