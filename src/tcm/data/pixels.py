"""Between pixels (uint8) or latents (float16) and what networks see (float32; pixels in [-1, 1])."""

import torch
from torch import Tensor

from tcm.foundation.errors import TcmError


def to_float(images: Tensor) -> Tensor:
    """Map uint8 pixels to float32 in [-1, 1], on the images' own device: x / 127.5 - 1; latents (float16) as they are.

    >>> to_float(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    if images.dtype == torch.float16:
        return images.to(torch.float32)
    if images.dtype != torch.uint8:
        raise TcmError(f"images have dtype {images.dtype}; to_float takes uint8 pixels (0 to 255)")
    return images.to(torch.float32) / 127.5 - 1


def to_uint8(images: Tensor) -> Tensor:
    """Map floats in [-1, 1] to uint8 pixels as the FID is defined: clamp(x * 127.5 + 128, 0, 255), truncated.

    >>> to_uint8(torch.tensor([-1.5, -1.0, 0.0, 1.0]))
    tensor([  0,   0, 128, 255], dtype=torch.uint8)
    """
    return (images.to(torch.float32) * 127.5 + 128).clamp(0, 255).to(torch.uint8)
