"""Frozen autoencoders: from images to the latents that a network sees, and back (the extra `t2i`)."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.foundation.tensors import bounded_by, shapes_for_library
from tcm.text.pipeline_folders import find_pipeline

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Latents:
    """The latents of an autoencoder (diffusers' AutoencoderKL), scaled to unit variance as its pipeline does.

    `vae` says where it is: a pipeline's folder or hub id, or the autoencoder's own folder. `vae_hash`, the SHA-256 of
    its weights, says which one it is. `factor` × `factor` pixels become `channels` numbers: the mean of the posterior,
    without noise, rounded to float16. The same image always has the same latents, computed ahead or when it is needed.
    """

    vae: str = field(compare=False)
    channels: int = 4
    factor: int = 8
    vae_hash: str = ""
    kind: Literal["vae"] = "vae"

    def __str__(self) -> str:
        identity = f" ({self.vae_hash[:8]})" if self.vae_hash else ""
        return f"latents of {self.vae}{identity}"

    @classmethod
    def of(cls, reference: str) -> "Latents":
        """Those of an autoencoder on this machine, or on the hub."""
        vae = load_autoencoder(reference, torch.device("cpu"))
        return cls(reference, vae.channels, vae.factor, vae.sha256)

    def of_images(self, shape: Shape) -> Shape:
        """The shape of the latents of images.

        >>> Latents("sd15").of_images((3, 512, 768))
        (4, 64, 96)
        """
        colours, height, width = shape
        if colours != 3 or height % self.factor or width % self.factor:
            raise TcmError(
                f"images of shape {list(shape)} have no latents: the autoencoder needs 3 channels and sides that are "
                f"multiples of {self.factor}; prepare them with `tcm data prepare --size 512 --channels 3`"
            )
        return self.channels, height // self.factor, width // self.factor

    def images_of(self, shape: Shape) -> Shape:
        """The shape of the images of latents."""
        _, height, width = shape
        return 3, height * self.factor, width * self.factor

    def encode(self, images: Tensor) -> Tensor:
        """The latents (B, C, H, W) in float16 of images in [−1, 1], on their device."""
        return _one_by_one(self._loaded(images.device).encode, images)

    def decode(self, latents: Tensor) -> Tensor:
        """The images in [−1, 1] of latents, on their device."""
        return _one_by_one(self._loaded(latents.device).decode, latents)

    def _loaded(self, device: torch.device) -> "Autoencoder":
        found = load_autoencoder(self.vae, device)
        if self.vae_hash not in ("", found.sha256):
            raise TcmError(
                f"the autoencoder {self.vae} has hash {found.sha256[:12]}…, but the model or its data was made with "
                f"{self.vae_hash[:12]}…; give the folder of that autoencoder"
            )
        return found


@dataclass(frozen=True)
class Autoencoder:
    """An AutoencoderKL of diffusers, frozen."""

    model: Any
    sha256: str
    channels: int
    factor: int
    scale: float
    shift: float

    @torch.no_grad()
    @fp32_products("ieee")
    def encode(self, images: Tensor) -> Tensor:
        mean = self.model.encode(images.to(self.model.dtype)).latent_dist.mean.float()
        return ((mean - self.shift) * self.scale).half()

    @torch.no_grad()
    @fp32_products("ieee")
    def decode(self, latents: Tensor) -> Tensor:
        scaled = latents.float() / self.scale + self.shift
        decoded: Tensor = self.model.decode(scaled.to(self.model.dtype)).sample
        return decoded.float().clamp(-1, 1)


@lru_cache(maxsize=4)
def load_autoencoder(reference: str, device: torch.device) -> Autoencoder:
    """An autoencoder, loaded once for a device: in half precision on an accelerator, in float32 on the CPU."""
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise TcmError(f"autoencoders need more packages; {how_to_install('t2i')}") from error
    pipeline = find_pipeline(reference)
    folder = Path(reference) if pipeline is None else pipeline / "vae"
    try:
        with bounded_by(shapes_for_library(folder), f"{folder}/config.json"):
            model = AutoencoderKL.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise TcmError(
            f"{folder} has no autoencoder that can be loaded ({reason}); give a pipeline's folder or hub id; if it was "
            "moved, correct latents.vae in the model's config.json"
        ) from error
    model = model.eval().requires_grad_(False)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.float().contiguous().view(-1).view(torch.uint8).numpy().data)
    config = model.config
    model = model.to(device) if device.type == "cpu" else model.to(device, torch.float16)
    factor = 2 ** (len(config.block_out_channels) - 1)
    shift = config.get("shift_factor") or 0.0
    return Autoencoder(model, digest.hexdigest(), config.latent_channels, factor, config.scaling_factor, shift)


def _one_by_one(convert: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Each image by itself: how kernels round may depend on the batch, and an image must not."""
    return torch.cat([convert(one) for one in torch.split(batch, 1)])
