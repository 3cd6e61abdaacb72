"""The small classifier of 8×8 digits whose features measure the demo. `tools/digits_classifier.py` trained it."""

from torch import Tensor, nn
from torch.nn import functional

FEATURES = 64


class DigitsClassifier(nn.Module):
    """Three convolutions and a hidden layer: [n, 1, 8, 8] in [-1, 1] → features [n, 64] → ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 48, 3, padding=1)])
        self.after_pool = nn.Conv2d(48, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, FEATURES)
        self.head = nn.Linear(FEATURES, 10)

    def features(self, images: Tensor) -> Tensor:
        """The hidden layer after its SiLU."""
        for convolution in self.convolutions:
            images = functional.silu(convolution(images))
        images = functional.silu(self.after_pool(functional.max_pool2d(images, 2)))
        return functional.silu(self.hidden(images.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits."""
        logits: Tensor = self.head(self.features(images))
        return logits
