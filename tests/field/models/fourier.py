"""A Fourier neural operator in two dimensions, whose images and kernels lie channels last."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, MODES, PLACES = 16, 3, 8


class Spectral(nn.Module):
    """Mixes the channels of the lowest frequencies, beside a convolution of every place."""

    def __init__(self) -> None:
        super().__init__()
        shape = (2, WIDTH, WIDTH, MODES, MODES, 2)
        self.weights = nn.Parameter(torch.randn(shape) / WIDTH)
        self.skip = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Write the low frequencies, of either sign, among zeros."""
        low, high = torch.view_as_complex(self.weights)
        seen = torch.fft.rfft2(x)
        made = torch.zeros_like(seen)
        mixing = "bixy,ioxy->boxy"
        made[:, :, :MODES, :MODES] = torch.einsum(mixing, seen[:, :, :MODES, :MODES], low)
        made[:, :, -MODES:, :MODES] = torch.einsum(mixing, seen[:, :, -MODES:, :MODES], high)
        return functional.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + self.skip(x))


class Fourier(nn.Module):
    """Lifts a field and its coordinates, mixes frequencies, projects."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 1, 1)
        self.layers = nn.ModuleList(Spectral() for _ in range(4))

    def forward(self, field: Tensor) -> Tensor:
        """Return the field of a later time."""
        places = torch.linspace(0, 1, PLACES, device=field.device, dtype=field.dtype)
        grid = torch.stack(torch.meshgrid(places, places, indexing="ij"))
        x = self.lift(torch.cat([field, grid.expand(field.shape[0], -1, -1, -1)], 1))
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.project(x)
        return out


def build_model() -> nn.Module:
    """Return the operator with its kernels channels last."""
    model = Fourier()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return fields, and what becomes of them where that was seen."""
    shape = (batch_size, 1, PLACES, PLACES)
    field = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    return {"field": field, "later": torch.randn(shape), "seen": torch.rand(shape) < 0.7}


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the error at the places that were seen."""
    seen = batch["seen"]
    return functional.mse_loss(outputs[seen], batch["later"][seen])
