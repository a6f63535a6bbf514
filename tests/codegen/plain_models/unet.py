"""A U-Net with batch norms, which marks the pixels of a shape."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.codegen.plain_models.rows import Row, Rows, example_of


class DoubleConv(nn.Module):
    """Two convolutions, each normalised over the batch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map an image to features of the same height and width."""
        out: Tensor = self.body(x)
        return out


class UNet(nn.Module):
    """Goes down twice and up twice, with a bridge across at each size."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.middle = DoubleConv(2 * width, 4 * width)
        self.lift2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = DoubleConv(4 * width, 2 * width)
        self.lift1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = DoubleConv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Map an image to the scores of each pixel."""
        wide = self.down1(image)
        small = self.down2(functional.max_pool2d(wide, 2))
        x = self.middle(functional.max_pool2d(small, 2))
        x = self.up2(torch.cat([small, self.lift2(x)], dim=1))
        x = self.up1(torch.cat([wide, self.lift1(x)], dim=1))
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return UNet()


def _row(numbers: Generator) -> Row:
    return {
        "image": torch.randn(3, 8, 8, generator=numbers),
        "mask": torch.randint(3, (8, 8), generator=numbers),
    }


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return images, and the class of each pixel."""
    return example_of(_row, batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over pixels."""
    return functional.cross_entropy(outputs, batch["mask"])


def build_dataset() -> Rows:
    """Return the images."""
    return Rows(_row)
