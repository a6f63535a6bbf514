"""A diffusion transformer (DiT), whose blocks are modulated by time and class."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.codegen.plain_models.rows import Row, Rows, example_of

CHANNELS, SIZE, PATCH, WIDTH, HEADS, CLASSES, TIMES = 2, 8, 2, 16, 4, 5, 1000


def waves(time: Tensor, width: int = WIDTH) -> Tensor:
    """Return sines and cosines of times."""
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, device=time.device) / half)
    angles = time[:, None].float() * rates[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift all places of a row alike."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """Attention and a feed-forward half, which a condition shifts, scales and opens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def attention(self, x: Tensor) -> Tensor:
        """Let all places attend to each other."""
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, n, c))
        return out

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map [batch, places, width] to the same shape."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift1, scale1))
        out: Tensor = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return out


class DiT(nn.Module):
    """Finds the noise in an image."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2, WIDTH) * 0.02)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.label = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.head = nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)

    def forward(self, image: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Return the mean square of what the model misses of the noise."""
        share = torch.cos(time.float() / TIMES * math.pi / 2)[:, None, None, None]
        noisy = share * image + (1 - share**2).sqrt() * noise
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.places
        condition = self.time(waves(time)) + self.label(label)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        x = self.head(modulate(self.norm(x), shift, scale))
        side = SIZE // PATCH
        x = x.reshape(-1, side, side, PATCH, PATCH, CHANNELS)
        found = torch.einsum("nhwpqc->nchpwq", x).reshape(-1, CHANNELS, SIZE, SIZE)
        return functional.mse_loss(found, noise)


def build_model() -> nn.Module:
    """Return the model."""
    return DiT()


def _row(numbers: Generator) -> Row:
    return {
        "image": torch.randn(CHANNELS, SIZE, SIZE, generator=numbers),
        "noise": torch.randn(CHANNELS, SIZE, SIZE, generator=numbers),
        "time": torch.randint(TIMES, (), generator=numbers),
        "label": torch.randint(CLASSES, (), generator=numbers),
    }


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return images with noise, a time and a class for each."""
    return example_of(_row, batch_size)


def build_dataset() -> Rows:
    """Return the images."""
    return Rows(_row)
