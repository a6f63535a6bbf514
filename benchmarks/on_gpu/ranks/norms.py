"""Times batch norms over several ranks, ours and torch's, beside the norm of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.modules._functions import SyncBatchNorm

from autopar.runtime.data_parallel.batch_norm import _Normalise
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.joining import axis_of_one, joined_alone
from benchmarks.on_gpu.report import Cell, Row
from benchmarks.on_gpu.timing import median_seconds

TABLE = "Ranks: batch norms, forward and backward"
_SHAPES = ((64, 64, 112, 112), (64, 256, 56, 56), (64, 2048, 7, 7))
_TINY_SHAPES = ((2, 4, 6, 6),)
_LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}

Norm: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def norm_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each shape, type and layout."""
    for cells in context.alone(_all_norms, context.device, context.tiny):
        yield Row(table=TABLE, cells=cells)


def _of_one_rank(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return functional.batch_norm(x, mean, variance, w, b, training=True)


def _ours(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    found: Tensor = _Normalise.apply(x, w, b, mean, variance, 1e-5, 0.1, axis_of_one())  # type: ignore[no-untyped-call]
    return found


def _of_torch(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    found: Tensor = SyncBatchNorm.apply(  # type: ignore[no-untyped-call]
        x, w, b, mean, variance, 1e-5, 0.1, dist.group.WORLD, 1
    )
    return found


def _all_norms(device: str, tiny: bool) -> list[dict[str, Cell]]:
    norms: dict[str, Norm] = {"F.batch_norm": _of_one_rank, "_Normalise": _ours}
    if device == "cuda":
        norms["SyncBatchNorm"] = _of_torch
    types = (torch.bfloat16, torch.float32)
    with joined_alone(device):
        shapes = _TINY_SHAPES if tiny else _SHAPES
        return [_timed(device, norms, *one) for one in product(shapes, types, _LAYOUTS)]


def _timed(
    device: str, norms: dict[str, Norm], shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> dict[str, Cell]:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).add(3).to(dtype, memory_format=_LAYOUTS[layout])
    y = torch.randn(shape, device=device).to(dtype, memory_format=_LAYOUTS[layout])
    exact = _run(_of_one_rank, x.double(), y.double())
    cells: dict[str, Cell] = {
        "shape": "×".join(map(str, shape)),
        "type": str(dtype).removeprefix("torch."),
        "layout": layout,
    }
    for name, norm in norms.items():
        found = _run(norm, x, y)
        parts = zip(found, exact, strict=True)
        apart = max(float((a.double() - b).norm() / b.norm()) for a, b in parts)
        cells[f"{name}: apart"] = apart
        cells[f"{name}: ms"] = 1e3 * median_seconds(lambda one=norm: _run(one, x, y), device)  # type: ignore[misc]
        cells[f"{name}: keeps its layout"] = str(found[0].stride() == x.stride())
    return cells


def _run(norm: Norm, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of input, weight and bias."""
    channels = x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    options: dict[str, Any] = {"device": x.device, "dtype": wide}
    weight = torch.linspace(0.5, 1.5, channels, **options).requires_grad_()
    bias = torch.linspace(-1, 1, channels, **options).requires_grad_()
    mean, variance = torch.zeros(channels, **options), torch.ones(channels, **options)
    own = x.detach().requires_grad_()
    made = norm(own, weight, bias, mean, variance)
    return made.detach(), *torch.autograd.grad(made, (own, weight, bias), gradient)
