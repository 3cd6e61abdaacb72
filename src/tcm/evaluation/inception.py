"""Inception-v3 of 2015-12-05, the network behind every published FID, in plain torch.

Batch normalisation is folded into the convolutions, the 1×1 convolutions at a block's entrance run as one, and the
1×1 convolution of a pooling branch runs before its average (they commute): the same features for less work.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZE = 299
DIMENSION = 2048
EPSILON = 1e-3
CONVOLUTIONS = 94
# Larger batches spend their time in the memory allocator; see benchmarks/features.py.
MICRO_BATCH = 8


class Convolution(nn.Module):
    """One or several convolutions of the same input, batch normalisation folded in: w' = w/σ, b' = β - μ/σ."""

    weight: Tensor
    bias: Tensor

    def __init__(
        self, weights: Mapping[str, Tensor], *names: str, stride: int = 1, pad: bool = True, relu: bool = True
    ) -> None:
        super().__init__()
        folded = [_fold(weights, name) for name in names]
        weight = torch.cat([weight for weight, _ in folded])
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", torch.cat([bias for _, bias in folded]))
        self.widths = [len(bias) for _, bias in folded]
        self.stride = stride
        self.padding = (weight.shape[2] // 2, weight.shape[3] // 2) if pad else (0, 0)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, and cut off below zero in place."""
        x = functional.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        return x.relu_() if self.relu else x


def _fold(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    weight, beta, mean, variance = (weights[f"{name}.{part}"].double() for part in ("weight", "beta", "mean", "var"))
    scale = (variance + EPSILON).rsqrt()
    return (weight * scale.view(-1, 1, 1, 1)).float(), (beta - mean * scale).float()


def _tower(weights: Mapping[str, Tensor], name: str, length: int) -> nn.Sequential:
    """The convolutions of a tower after its first, which the block's entrance already did."""
    return nn.Sequential(*(Convolution(weights, f"{name}.conv_{i}") for i in range(1, length + 1)))


def _average(x: Tensor) -> Tensor:
    return functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False).relu_()


class Mixed(nn.Module):
    """1×1 | tower | tower | average pool, concatenated (mixed to mixed_2, mixed_4 to mixed_7)."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, lengths: tuple[int, int]) -> None:
        super().__init__()
        self.entrance = Convolution(weights, f"{name}.conv", f"{name}.tower.conv", f"{name}.tower_1.conv")
        self.tower = _tower(weights, f"{name}.tower", lengths[0])
        self.tower_1 = _tower(weights, f"{name}.tower_1", lengths[1])
        self.pooled = Convolution(weights, f"{name}.tower_2.conv", relu=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.entrance(x).split(self.entrance.widths, 1)
        return torch.cat([a, self.tower(b), self.tower_1(c), _average(self.pooled(x))], 1)


class FirstReduction(nn.Module):
    """Strided 3×3 | tower | max pool (mixed_3: 35² → 17²)."""

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self.convolution = Convolution(weights, f"{name}.conv", stride=2, pad=False)
        self.tower = nn.Sequential(
            Convolution(weights, f"{name}.tower.conv"),
            Convolution(weights, f"{name}.tower.conv_1"),
            Convolution(weights, f"{name}.tower.conv_2", stride=2, pad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.convolution(x), self.tower(x), functional.max_pool2d(x, 3, 2)], 1)


class SecondReduction(nn.Module):
    """Tower | tower | max pool (mixed_8: 17² → 8²)."""

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self.entrance = Convolution(weights, f"{name}.tower.conv", f"{name}.tower_1.conv")
        self.tower = Convolution(weights, f"{name}.tower.conv_1", stride=2, pad=False)
        self.tower_1 = nn.Sequential(
            *_tower(weights, f"{name}.tower_1", 2),
            Convolution(weights, f"{name}.tower_1.conv_3", stride=2, pad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.entrance(x).split(self.entrance.widths, 1)
        return torch.cat([self.tower(a), self.tower_1(b), functional.max_pool2d(x, 3, 2)], 1)


class Wide(nn.Module):
    """1×1 | (1×3, 3×1) | (1×3, 3×1) | pool (mixed_9, and mixed_10 whose pool takes the maximum)."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, maximum: bool) -> None:
        super().__init__()
        self.entrance = Convolution(weights, f"{name}.conv", f"{name}.tower_conv", f"{name}.tower_1_conv")
        self.tower_1 = Convolution(weights, f"{name}.tower_1_conv_1")
        self.across = Convolution(weights, f"{name}.tower_mixed_conv")
        self.down = Convolution(weights, f"{name}.tower_mixed_conv_1")
        self.across_1 = Convolution(weights, f"{name}.tower_1_mixed_conv")
        self.down_1 = Convolution(weights, f"{name}.tower_1_mixed_conv_1")
        self.pooled = Convolution(weights, f"{name}.tower_2_conv", relu=maximum)
        self.maximum = maximum

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.entrance(x).split(self.entrance.widths, 1)
        c = self.tower_1(c)
        pooled = self.pooled(functional.max_pool2d(x, 3, 1, 1)) if self.maximum else _average(self.pooled(x))
        return torch.cat([a, self.across(b), self.down(b), self.across_1(c), self.down_1(c), pooled], 1)


class Inception(nn.Module):
    """Images with values 0 … 255 [n, 3, h, w] of any size → features [n, 2048]."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Convolution(weights, "conv", stride=2, pad=False),
            Convolution(weights, "conv_1", pad=False),
            Convolution(weights, "conv_2"),
            nn.MaxPool2d(3, 2),
            Convolution(weights, "conv_3"),
            Convolution(weights, "conv_4", pad=False),
            nn.MaxPool2d(3, 2),
            *(Mixed(weights, name, (1, 2)) for name in ("mixed", "mixed_1", "mixed_2")),
            FirstReduction(weights, "mixed_3"),
            *(Mixed(weights, name, (2, 4)) for name in ("mixed_4", "mixed_5", "mixed_6", "mixed_7")),
            SecondReduction(weights, "mixed_8"),
            Wide(weights, "mixed_9", maximum=False),
            Wide(weights, "mixed_10", maximum=True),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Resize, scale to (x - 128) / 128, run the layers, average over the 8×8 positions."""
        dtype = next(self.buffers()).dtype
        parts = []
        for part in torch.split(images, MICRO_BATCH):
            x = (resize(part.float()) - 128) / 128
            parts.append(self.layers(x.to(dtype, memory_format=torch.channels_last)).float().mean((2, 3)))
        return torch.cat(parts)


def resize(images: Tensor, size: int = SIZE) -> Tensor:
    """Bilinear as TensorFlow 1 did it and FID inherited it: pixel i reads at i · input/output, no half-pixel shift.

    Separable, so two small matrix products: `rows @ image @ columnsᵀ`.
    """
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    rows, columns = (_interpolation(source, size, images.dtype, images.device) for source in (height, width))
    return rows @ images @ columns.T


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _interpolation(source: int, target: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix [target, source] with two weights per row; the same for all images of a size, so built once."""
    position = torch.arange(target, dtype=torch.float64) * (source / target)
    low = position.long()
    share = position - low
    rows = torch.arange(target)
    matrix = torch.zeros(target, source, dtype=torch.float64)
    matrix[rows, low] += 1 - share
    matrix[rows, (low + 1).clamp(max=source - 1)] += share
    return matrix.to(device, dtype)


def layer_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layers' tensors out of a published file's state, which prefixes them with `layers.` or `net.layers.`."""
    return {name.rpartition("layers.")[2]: tensor.detach() for name, tensor in state.items() if "layers." in name}


def is_inception(state: Mapping[str, Tensor]) -> bool:
    """Whether a TorchScript file's state holds this network: 94 convolutions under their published names."""
    names = layer_weights(state).keys()
    return len(names) == 4 * CONVOLUTIONS and {"conv.weight", "mixed_10.tower_2_conv.beta"} <= names
