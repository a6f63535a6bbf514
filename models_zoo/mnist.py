"""A perceptron that reads handwritten digits.

Sizes: tiny, 512 (the network of PyTorch's quickstart). Data: a folder with MNIST's IDX files.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from image_data import LabelledImages, PrototypeImages, read_mnist
from sizes import pick_size
from torch import Tensor, nn
from torch.utils.data import Dataset

IMAGE_SIZE = 28
CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the perceptron."""

    layers: int = 2  # hidden ones
    hidden: int


SIZES = {"tiny": Config(hidden=64), "512": Config(hidden=512)}


class Perceptron(nn.Module):
    """Maps images to the logits of their digits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [IMAGE_SIZE**2] + [config.hidden] * config.layers
        self.hidden = nn.ModuleList(
            nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)
        )
        self.out = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, 1, 28, 28] to [batch, 10]."""
        x = images.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.out(x)


def build_model(
    size: str = "tiny", layers: int | None = None, hidden: int | None = None
) -> nn.Module:
    """Return a perceptron of a size, changed by the arguments that are not None."""
    return Perceptron(pick_size(SIZES, size, layers=layers, hidden=hidden))


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return noise with random labels."""
    return {
        "images": torch.randn(batch_size, 1, IMAGE_SIZE, IMAGE_SIZE),
        "labels": torch.randint(CLASSES, (batch_size,)),
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per image, in nats."""
    return F.cross_entropy(outputs, batch["labels"])


def build_dataset(data: str | None = None, items: int = 4096) -> Dataset[dict[str, Tensor]]:
    """Return MNIST from the folder `data`, or `items` generated pictures."""
    if data is None:
        return PrototypeImages(1, IMAGE_SIZE, CLASSES, items)
    return LabelledImages(*read_mnist(data), IMAGE_SIZE, CLASSES)
