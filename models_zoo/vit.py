"""The vision transformer (Dosovitskiy et al. 2020): a transformer over patches of a picture.

Sizes: tiny (32 × 32), b16, l16, h14 (224 × 224). Data: a folder with CIFAR-10, binary version.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from image_data import LabelledImages, PrototypeImages, read_cifar10
from sizes import pick_size
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a vision transformer."""

    layers: int
    heads: int
    dim: int
    patch: int
    image_size: int = 224
    classes: int = 1000
    dropout: float = 0.0


SIZES = {
    "tiny": Config(layers=2, heads=4, dim=64, patch=8, image_size=32, classes=10),
    "b16": Config(layers=12, heads=12, dim=768, patch=16),
    "l16": Config(layers=24, heads=16, dim=1024, patch=16),
    "h14": Config(layers=32, heads=16, dim=1280, patch=14),
}


class SelfAttention(nn.Module):
    """Self-attention of every patch to every patch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.head_dim = config.dim // config.heads

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, -1, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.attention = SelfAttention(config)
        self.norm_2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.fc_1 = nn.Linear(config.dim, 4 * config.dim)
        self.fc_2 = nn.Linear(4 * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.fc_2(F.gelu(self.fc_1(self.norm_2(x)))))


class ViT(nn.Module):
    """Maps images to the logits of their classes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        patches = (config.image_size // config.patch) ** 2
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.positions = nn.Parameter(torch.empty(1, patches + 1, config.dim))
        self.patches = nn.Conv2d(3, config.dim, kernel_size=config.patch, stride=config.patch)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.classes)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, 3, height, width] to [batch, classes]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build_model(
    size: str = "tiny",
    layers: int | None = None,
    image_size: int | None = None,
    classes: int | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """Return a ViT of a published size, changed by the arguments that are not None."""
    return ViT(
        pick_size(
            SIZES, size, layers=layers, image_size=image_size, classes=classes, dropout=dropout
        )
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
