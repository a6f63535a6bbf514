"""Compares gradients of layers that run again with those of layers that keep everything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.runtime.recompute import recompute
from autopar.runtime.recompute.running_again import Mode
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.report import Cell, Row

TABLE = "Ranks: gradients of recomputed layers with dropout, beside layers that keep everything"
_MODES: tuple[Mode, ...] = ("full", "selective")


class _Block(nn.Module):
    """A layer with dropout in its attention and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.outward = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        """Attend, and project."""
        split = self.attention(hidden).view(*hidden.shape[:2], 3, 4, 16).transpose(1, 3)
        q, k, v = split.unbind(2)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        y = y.transpose(1, 2).reshape(hidden.shape)
        return hidden + scale * functional.dropout(self.outward(y), 0.3)


def recomputation_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each mode and way to call a layer."""
    for cells in context.alone(_all_ways, context.device):
        yield Row(table=TABLE, cells=cells)


def _all_ways(device: str) -> list[dict[str, Cell]]:
    types = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    return [_one_way(device, *one) for one in product(_MODES, ("by position", "by keyword"), types)]


def _one_way(device: str, mode: Mode, way: str, dtype: torch.dtype) -> dict[str, Cell]:
    expected = _gradients(device, "none", way, dtype)
    again = _gradients(device, "none", way, dtype)
    found = _gradients(device, mode, way, dtype)
    apart = _largest(found, expected)
    noise = _largest(again, expected)
    is_equal = apart <= max(2 * noise, 1e-5 if dtype is torch.float32 else 0.02)
    return {
        "mode": mode,
        "called": way,
        "type": str(dtype).removeprefix("torch."),
        "found": "equal" if is_equal else "OTHER GRADIENTS",
        "apart, relative": apart,
        "of two runs that keep everything": noise,
    }


def _largest(found: list[Tensor], expected: list[Tensor]) -> float:
    scale = max(float(one.abs().max()) for one in expected)
    differences = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in differences) / scale


def _gradients(device: str, mode: Mode, way: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    layers = nn.ModuleList(_Block() for _ in range(3)).to(device, dtype)
    for layer in layers:
        recompute(layer, mode)
    x = torch.randn(2, 32, 64, device=device, dtype=dtype)
    torch.manual_seed(2)  # for the dropout
    for layer in layers:
        x = layer(hidden=x) if way == "by keyword" else layer(x)
    torch.manual_seed(3)  # the recomputed forwards must go back to the states before this
    x.float().square().sum().backward()  # type: ignore[no-untyped-call]
    return [one.grad.float() for one in layers.parameters() if one.grad is not None]
