"""A kind of condition that the package does not know: the brightness of the left and the right half of an image."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tcm.data import Annotations, ArrayDataset, Sample, Stream
from tcm.data.dataset import Indices
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition, ConditionChoice, ConditionKind
from tcm.method.preconditioning import Masks, Network
from tcm.networks import ImageShape, NetworkConfig


@dataclass(frozen=True)
class Vectors(Condition):
    """(B, width); the null condition is NaN."""

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def select(self, rows: Tensor | slice) -> Self:
        return type(self)(self.values[rows])

    def keep(self, kept: Tensor) -> Self:
        return type(self)(torch.where(kept[:, None], self.values, torch.nan))

    def to(self, device: torch.device) -> Self:
        return type(self)(self.values.to(device))


@dataclass(frozen=True)
class VectorKind(ConditionKind):
    """Vectors of `width` numbers in [−1, 1]."""

    width: int
    kind: Literal["vector_condition:VectorKind"] = "vector_condition:VectorKind"

    def __str__(self) -> str:
        return f"vectors of {self.width} numbers"

    def choose(self, choice: ConditionChoice, count: int) -> Vectors:
        rows = [choice] * count if isinstance(choice, str) else list(choice)
        values = torch.tensor([[float(number) for number in str(row).split(",")] for row in rows])
        if values.shape != (count, self.width):
            raise TcmError(f"{choice}: give {self.width} numbers for each of {count} images")
        return Vectors(values)

    def draw(self, seeds: Sequence[int]) -> Vectors:
        return Vectors(SampleStreams(list(seeds)).normal((self.width,)).clamp(-1, 1))

    def spread(self, count: int) -> Vectors:
        return Vectors(torch.linspace(-1, 1, count)[:, None].expand(count, self.width))

    def takes(self, condition: Condition) -> bool:
        return isinstance(condition, Vectors) and condition.values.shape[1] == self.width

    def captions(self, condition: Condition) -> list[str]:
        assert isinstance(condition, Vectors)
        return ["; ".join(f"{number:.2f}" for number in row) for row in condition.values.tolist()]


@dataclass(frozen=True)
class Halves(Annotations):
    """A vector for each image."""

    values: np.ndarray

    @property
    def kind(self) -> VectorKind:
        return VectorKind(self.values.shape[1])

    def __len__(self) -> int:
        return len(self.values)

    def select(self, indices: Indices) -> Self:
        return type(self)(self.values[indices])

    def condition(self, indices: Indices) -> Vectors:
        return Vectors(torch.from_numpy(self.values[indices]))

    def content(self) -> bytes:
        return self.values.astype("<f4").tobytes()


class HalvesData(ArrayDataset):
    """Images of 8 × 8 whose halves are as bright as their vector says, to 8 bits."""

    def __init__(self) -> None:
        levels = np.random.default_rng(0).integers(0, 256, (80, 2), np.uint8)
        images = np.repeat(levels, 4, axis=1)[:, None, None, :].repeat(8, axis=2)
        super().__init__(images, Halves((levels / 127.5 - 1).astype(np.float32)))


class HalvesStream(Stream):
    """The same, one after another in four shards; a sample's annotation is its vector."""

    def __init__(self) -> None:
        super().__init__("halves", "80 halves", shards=4)

    def shard(self, number: int) -> Iterator[Sample]:
        data = HalvesData()
        assert isinstance(data.annotations, Halves)
        for index in range(number, data.count, self.shards):
            file = io.BytesIO()
            Image.fromarray(data.pixels(np.array([index]))[0, 0]).save(file, "png")
            yield Sample(f"half {index}", file.getvalue(), data.annotations.values[index])

    @property
    def condition_kind(self) -> VectorKind:
        return VectorKind(2)

    def condition(self, samples: Sequence[Sample]) -> Vectors:
        return Vectors(torch.from_numpy(np.stack([np.asarray(sample.annotation) for sample in samples])))


class VectorConfig(NetworkConfig):
    """A convolution, and a linear map of the vector."""

    @classmethod
    def takes(cls, condition: ConditionKind | None) -> bool:
        return isinstance(condition, VectorKind)

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "VectorNetwork":
        assert isinstance(condition, VectorKind)
        return VectorNetwork(image_shape, condition.width)


class VectorNetwork(Network):
    """F = W x + V c; no vector counts as zeros."""

    def __init__(self, image_shape: ImageShape, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(image_shape[0], image_shape[0], 3, padding=1)
        self.vector = nn.Linear(width, image_shape[1] * image_shape[2])

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        assert isinstance(condition, Vectors)
        assert len(condition) == len(x)
        return self.convolution(x) + self.vector(condition.values.nan_to_num(0.0)).view(len(x), 1, *x.shape[2:])
