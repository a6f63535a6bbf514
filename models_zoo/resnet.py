"""Residual networks (He et al. 2015) for CIFAR and for ImageNet.

Sizes: tiny (8 layers), 20 (CIFAR), 50 (ImageNet). Data: a folder with CIFAR-10, binary version.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from image_data import LabelledImages, PrototypeImages, read_cifar10
from sizes import pick_size
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a residual network."""

    blocks: tuple[int, ...]  # of each stage
    width: int  # channels of the first stage; each later one has twice as many
    expansion: int = 1  # channels of a block's output per inner channel: 4 in a bottleneck
    image_size: int = 32
    classes: int = 10
    shortcut: str = "conv"  # where the shape changes: "conv", or "pad" with zeros (He's option A)
    norm: str = "batch"  # or "group", which normalises each image alone


SIZES = {
    "tiny": Config(blocks=(1, 1, 1), width=16),
    "20": Config(blocks=(3, 3, 3), width=16),
    "50": Config(blocks=(3, 4, 6, 3), width=64, expansion=4, image_size=224, classes=1000),
}


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the picture's size, or divides it by the stride."""
    padding = kernel // 2
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)


def norm_for(channels: int, config: Config) -> nn.Module:
    """Return the normalisation of a convolution's output."""
    if config.norm == "batch":
        return nn.BatchNorm2d(channels)
    if config.norm == "group":
        return nn.GroupNorm(min(32, channels // 4), channels)
    raise ValueError(f'norm {config.norm!r} is unknown; there are: "batch", "group"')


class PadShortcut(nn.Module):
    """A shortcut without parameters: keeps every `stride`-th pixel, and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to more channels of smaller pictures."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


def shortcut_for(inputs: int, outputs: int, stride: int, config: Config) -> nn.Module:
    """Return a module that brings a block's input to the shape of its output."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if config.shortcut == "conv":
        return nn.Sequential(conv(inputs, outputs, 1, stride), norm_for(outputs, config))
    if config.shortcut == "pad":
        return PadShortcut(inputs, outputs, stride)
    raise ValueError(f'shortcut {config.shortcut!r} is unknown; there are: "conv", "pad"')


class BasicBlock(nn.Module):
    """Two convolutions; their result is added to the input."""

    def __init__(self, inputs: int, inside: int, stride: int, config: Config) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, inside, 3, stride), norm_for(inside, config)
        self.conv2, self.bn2 = conv(inside, inside, 3), norm_for(inside, config)
        self.shortcut = shortcut_for(inputs, inside, stride, config)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, outputs, …]; a stride shrinks pictures."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3 × 3 convolution between two of 1 × 1 that narrow and widen; the input is added last."""

    def __init__(self, inputs: int, inside: int, stride: int, config: Config) -> None:
        super().__init__()
        outputs = inside * config.expansion
        self.conv1, self.bn1 = conv(inputs, inside, 1), norm_for(inside, config)
        self.conv2, self.bn2 = conv(inside, inside, 3, stride), norm_for(inside, config)
        self.conv3, self.bn3 = conv(inside, outputs, 1), norm_for(outputs, config)
        self.shortcut = shortcut_for(inputs, outputs, stride, config)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, outputs, …]; a stride shrinks pictures."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


def stem(config: Config) -> nn.Sequential:
    """Return the layers before the blocks; they make large pictures four times smaller."""
    if config.image_size <= 64:
        return nn.Sequential(conv(3, config.width, 3), norm_for(config.width, config), nn.ReLU())
    return nn.Sequential(
        conv(3, config.width, 7, stride=2),
        norm_for(config.width, config),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


class ResNet(nn.Module):
    """Maps images to the logits of their classes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        block = BasicBlock if config.expansion == 1 else Bottleneck
        self.stem = stem(config)
        self.blocks = nn.ModuleList()
        channels = config.width
        for stage, count in enumerate(config.blocks):
            inside = config.width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(block(channels, inside, stride, config))
                channels = inside * config.expansion
        self.fc = nn.Linear(channels, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, 3, height, width] to [batch, classes]."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean(dim=(2, 3)))


def build_model(
    size: str = "tiny",
    image_size: int | None = None,
    classes: int | None = None,
    shortcut: str | None = None,
    norm: str | None = None,
) -> nn.Module:
    """Return a residual network of a published size, changed by the arguments that are not None."""
    return ResNet(
        pick_size(SIZES, size, image_size=image_size, classes=classes, shortcut=shortcut, norm=norm)
    )


def example_batch(
    batch_size: int, size: str = "tiny", image_size: int | None = None, classes: int | None = None
) -> dict[str, Tensor]:
    """Return noise with random labels."""
    config = pick_size(SIZES, size, image_size=image_size, classes=classes)
    return {
        "images": torch.randn(batch_size, 3, config.image_size, config.image_size),
        "labels": torch.randint(config.classes, (batch_size,)),
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per image, in nats."""
    return F.cross_entropy(outputs, batch["labels"])


def build_dataset(
    size: str = "tiny",
    data: str | None = None,
    items: int = 4096,
    image_size: int | None = None,
    classes: int | None = None,
) -> Dataset[dict[str, Tensor]]:
    """Return CIFAR-10 from the folder `data`, or `items` generated pictures."""
    config = pick_size(SIZES, size, image_size=image_size, classes=classes)
    if data is None:
        return PrototypeImages(3, config.image_size, config.classes, items)
    return LabelledImages(*read_cifar10(data), config.image_size, config.classes)


def build_optimizer(params: Iterable[nn.Parameter], learning_rate: float = 0.1) -> Optimizer:
    """Return SGD as He et al. used it."""
    return SGD(params, lr=learning_rate, momentum=0.9, weight_decay=1e-4)


def build_scheduler(optimizer: Optimizer, steps: int = 64000) -> MultiStepLR:
    """Return a schedule that divides the rate by ten after half and three quarters of the steps."""
    return MultiStepLR(optimizer, milestones=[steps // 2, 3 * steps // 4])
