"""Detectors: networks that turn images into the features in which they are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tcm.evaluation import efficientnet, inception, inception_weights
from tcm.evaluation.digits import FEATURES, DigitsClassifier
from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError

NAMES = ("inception", "digits", efficientnet.NAME)
DIGITS_FILE = Path(__file__).with_name("digits.safetensors")


@dataclass(frozen=True)
class Detector:
    """A named, hashed feature extractor: uint8 images in, float32 features out.

    >>> detector = load_detector("digits")
    >>> detector.features(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape
    torch.Size([2, 64])
    """

    name: str
    hash: str
    dimension: int
    preprocessing: str
    distance_name: str
    network: nn.Module
    device: torch.device
    head: Tensor | None = None
    image_shape: tuple[int, int, int] | None = None

    @fp32_products("ieee")
    def features(self, images: Tensor) -> Tensor:
        """Features [n, d] of uint8 images [n, C, H, W]; grey is repeated to RGB where the network wants it."""
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise TcmError(
                f"images are {images.dtype} of shape {tuple(images.shape)}; "
                "a detector takes uint8 [n, channels, height, width]"
            )
        if self.image_shape is not None and tuple(images.shape[1:]) != self.image_shape:
            raise TcmError(
                f"images of shape {tuple(images.shape[1:])} do not fit the detector {self.name!r}, which takes "
                f"{self.image_shape}; use the detector 'inception'"
            )
        if self.image_shape is None:
            images = _three_channels(images)
        with torch.inference_mode():
            found = self.network(images.to(self.device).float())
        return _checked_features(found, len(images), self.name).float().cpu().clone()

    def probabilities(self, features: Tensor) -> Tensor:
        """Class probabilities [n, classes] from features: softmax(W f), without a bias, as the Inception score."""
        if self.head is None:
            raise TcmError(f"the detector {self.name!r} has no class head, and so no class probabilities")
        return (features.double() @ self.head.double().T).softmax(1)


def _three_channels(images: Tensor) -> Tensor:
    channels = images.shape[1]
    if channels == 1:
        return images.expand(-1, 3, -1, -1)
    if channels != 3:
        raise TcmError(f"images have {channels} channels; the detector takes 1 (repeated to 3) or 3")
    return images


def _checked_features(found: object, count: int, name: str) -> Tensor:
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != count:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TcmError(
            f"the detector {name!r} returned {shape} for {count} images; it must return one row of features per image"
        )
    return found


def load_detector(name: str, device: torch.device | str = "cpu", precision: str = "fp32") -> Detector:
    """Load `inception` (the network of all papers' FID), `digits` (the demo's), `efficientnet-lite0` (ten times as fast
    as Inception, for looks during training), or a TorchScript file by its path.

    A file with the weights of the 2015-12-05 Inception runs on our own forward pass. Any other file is called with
    float32 images [n, 3, H, W] of values 0 … 255 and must return features [n, d]. `precision="bf16"` is faster and
    moves the features a little: not for scores that are reported.
    """
    if precision not in ("fp32", "bf16"):
        raise TcmError(f"precision={precision!r} is unknown; use fp32 or bf16")
    device = torch.device(device)
    if name == "digits":
        return _digits(device)
    if name == "inception":
        return _torchscript(inception_weights.inception_file(), device, precision)
    if name == efficientnet.NAME:
        return _efficientnet(device, precision)
    check_known(name)
    return _torchscript(Path(name), device, precision)


def check_known(name: str) -> None:
    """Refuse a detector that is neither one of ours nor a file."""
    if name not in NAMES and not Path(name).is_file():
        raise TcmError(f"detector={name!r} is not known; use {', '.join(NAMES)}, or a TorchScript file")


class _DigitsFeatures(nn.Module):
    def __init__(self, classifier: DigitsClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier.features(images / 127.5 - 1)


def _digits(device: torch.device) -> Detector:
    weights = load_file(DIGITS_FILE)
    classifier = DigitsClassifier()
    classifier.load_state_dict(weights)
    return Detector(
        name="digits",
        hash=weights_hash(weights),
        dimension=FEATURES,
        preprocessing="8x8 grey, x/127.5-1, fp32",
        distance_name="digits distance",
        network=_DigitsFeatures(classifier).eval().to(device),
        head=classifier.head.weight.detach(),
        image_shape=(1, 8, 8),
        device=device,
    )


def _efficientnet(device: torch.device, precision: str) -> Detector:
    if precision != "fp32":
        raise TcmError(f"precision={precision!r} is for the detector 'inception'; leave it out for {efficientnet.NAME}")
    weights = efficientnet.efficientnet_weights()
    return Detector(
        name=efficientnet.NAME,
        hash=weights_hash(weights),
        dimension=efficientnet.DIMENSION,
        preprocessing=f"grey repeated to RGB, antialiased bilinear to {efficientnet.SIZE}, (x-127)/128, fp32",
        distance_name=f"Fréchet distance in {efficientnet.NAME}",
        network=efficientnet.EfficientNet(weights).eval().to(device),
        device=device,
    )


def _torchscript(path: Path, device: torch.device, precision: str) -> Detector:
    try:
        module = torch.jit.load(str(path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise TcmError(
            f"{path} is not a TorchScript file: {str(error).splitlines()[0]}; save it with torch.jit.save"
        ) from error
    state = module.state_dict()
    if inception.is_inception(state):
        return _inception(state, device, precision)
    if precision != "fp32":
        raise TcmError(f"precision={precision!r} is for the detector 'inception'; {path.name} runs as it was saved")
    module = module.to(device)
    try:
        probe = module(torch.zeros(1, 3, inception.SIZE, inception.SIZE, device=device))
    except RuntimeError as error:
        raise TcmError(f"{path} does not take float32 images [n, 3, H, W]: {str(error).splitlines()[-1]}") from error
    return Detector(
        name=path.stem,
        hash=hashlib.sha256(path.read_bytes()).hexdigest(),
        dimension=_checked_features(probe, 1, path.stem).shape[1],
        preprocessing="RGB, 0..255, fp32",
        distance_name=f"Fréchet distance in {path.stem}",
        network=module,
        device=device,
    )


def _inception(state: Mapping[str, Tensor], device: torch.device, precision: str) -> Detector:
    weights = inception.layer_weights(state)
    network = inception.Inception(weights).eval().to(device)
    return Detector(
        name="inception",
        hash=weights_hash(weights),
        dimension=inception.DIMENSION,
        preprocessing=f"grey repeated to RGB, TF1 bilinear to 299, (x-128)/128, {precision}",
        distance_name="FID",
        network=network.bfloat16() if precision == "bf16" else network,
        head=state["output.weight"].detach() if "output.weight" in state else None,
        device=device,
    )


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and values, so that two files that hold the same weights have the same hash."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
