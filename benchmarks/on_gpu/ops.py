"""Times the kernels that models are made of: their FLOPs and bytes per second."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from autopar.planner.cluster.cluster import Device
from autopar.planner.profile.profile import local_device
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.report import Cell, Row
from benchmarks.on_gpu.timing import median_seconds

TABLE = "Ops: kernels, and the rates that they reach"
_TINY = 16  # a tiny size is this many times smaller
_MOST_SECONDS = 60.0  # for a group of kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A call to time, and the FLOPs and bytes of its kernels."""

    name: str
    call: Callable[[], Any]
    flops: float = 0.0
    moved_bytes: float = 0.0


Group: TypeAlias = Callable[[int, str], Iterator[Kernel]]


def ops(context: Context) -> Iterator[Row]:
    """Yield a row for each kernel; each group has a process of its own."""
    divided = _TINY if context.tiny else 1
    run = context.alone if context.tiny else context.fresh
    for name in GROUPS:
        if context.seconds_left < 10:
            return
        try:
            for cells in run(_timed_group, name, divided, context.device, seconds=_MOST_SECONDS):
                yield Row(table=TABLE, cells=cells)
        except Exception as error:
            yield Row(table=TABLE, cells={"kernel": name, "error": str(error)[-300:]})


def _timed_group(name: str, divided: int, device: str) -> list[dict[str, Cell]]:
    sheet = local_device()
    found = []
    for kernel in GROUPS[name](divided, device):
        try:
            found.append(_cells(kernel, median_seconds(kernel.call, device), sheet))
        except torch.OutOfMemoryError as error:
            found.append({"kernel": kernel.name, "error": str(error)[:100]})
        gc.collect()
    return found


def _cells(kernel: Kernel, seconds: float, sheet: Device) -> dict[str, Cell]:
    cells: dict[str, Cell] = {"kernel": kernel.name, "ms": 1e3 * seconds}
    if kernel.flops:
        cells["TFLOP/s"] = kernel.flops / seconds / 1e12
    if kernel.moved_bytes:
        cells["GB/s"] = kernel.moved_bytes / seconds / 1e9
        cells["of the sheet's"] = kernel.moved_bytes / seconds / sheet.memory_bytes_per_second
    return cells


def _products(divided: int, device: str) -> Iterator[Kernel]:
    """Yield products of Llama 1B and 8B: forward, and the gradients of input and weight."""
    tokens = 8192 // divided
    for inputs, outputs in (
        (2048, 2048),
        (2048, 8192),
        (8192, 2048),
        (4096, 14336),
        (2048, 128256),
    ):
        n, k = outputs // divided, inputs // divided
        x, w, y = (_noise(device, *shape) for shape in ((tokens, k), (n, k), (tokens, n)))
        flops = 2.0 * tokens * n * k
        calls: Mapping[str, Callable[[], Tensor]] = {
            "x·wᵀ": lambda x=x, w=w: x @ w.t(),  # type: ignore[misc]
            "y·w": lambda y=y, w=w: y @ w,  # type: ignore[misc]
            "yᵀ·x": lambda x=x, y=y: y.t() @ x,  # type: ignore[misc]
        }
        for way, call in calls.items():
            yield Kernel(name=f"bf16 {way}, {tokens} × {k} × {n}", call=call, flops=flops)


def _unaligned(divided: int, device: str) -> Iterator[Kernel]:
    """Yield products whose rows have a multiple of 16, 8, 4 or only 2 bytes."""
    tokens, inputs = 8192 // divided, 4096 // divided
    for outputs in (8192 // divided + more for more in (0, 4, 2, 1)):
        x, w, y = (
            _noise(device, *shape)
            for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        flops = 2.0 * tokens * outputs * inputs
        name = f"bf16, {tokens} × {inputs} × {outputs}"
        yield Kernel(name=f"{name}: x·wᵀ", call=lambda x=x, w=w: x @ w.t(), flops=flops)  # type: ignore[misc]
        yield Kernel(name=f"{name}: yᵀ·x", call=lambda x=x, y=y: y.t() @ x, flops=flops)  # type: ignore[misc]


def _strided(divided: int, device: str) -> Iterator[Kernel]:
    """Yield casts, sums over rows, and ops on operands that are broadcast or parts of tensors."""
    tokens, heads, seq = 8192 // divided, 32, 32
    x = _noise(device, tokens, 4096)
    wide, row = x.float(), _noise(device, 4096)
    turned = x.view(-1, seq, heads, 128).transpose(1, 2)
    cos, half = _noise(device, seq, 128), turned[..., :64]
    size = 2.0 * x.numel()
    calls: Mapping[str, tuple[Callable[[], Any], float]] = {
        "bf16 → fp32": (lambda: wide.copy_(x), 3 * size),
        "fp32 → bf16": (lambda: x.copy_(wide), 3 * size),
        "sum over rows": (lambda: x.sum(0), size),
        "x · w, broadcast over rows": (lambda: x * row, 2 * size),
        "x · cos, broadcast over heads": (lambda: turned * cos, 2 * size),
        "−x of half of the last dim": (lambda: -half, size),
        "transpose(1, 2).contiguous()": (lambda: turned.contiguous(), 2 * size),
        "cat of two halves": (lambda: torch.cat((turned[..., 64:], half), -1), 2 * size),
        "cat of two tensors": (lambda: torch.cat((x, x), -1), 4 * size),
    }
    for name, (call, moved) in calls.items():
        yield Kernel(name=f"bf16 {name}, {tokens} × 4096", call=call, moved_bytes=moved)


def _batch_norms(divided: int, device: str) -> Iterator[Kernel]:
    for shape in ((64, 64, 112, 112), (128, 256, 56, 56), (128, 1024, 14, 14), (128, 2048, 7, 7)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = _noise(device, max(shape[0] // divided, 2), *shape[1:]).to(dtype).requires_grad_()
            w = torch.ones(shape[1], device=device, requires_grad=True)

            def forward(x: Tensor = x, w: Tensor = w) -> Tensor:
                return functional.batch_norm(x, None, None, w, w, training=True)

            size = float(x.numel() * x.element_size())
            name = f"{str(dtype).removeprefix('torch.')} batch_norm, {tuple(x.shape)}"
            gradient = torch.randn_like(x)
            yield from _both_ways(name, forward, (x, w), gradient, moved=(3 * size, 5 * size))


def _attention(divided: int, device: str) -> Iterator[Kernel]:
    for rows, heads, tokens, width in ((2, 32, 4096, 64), (1, 32, 4096, 128), (16, 12, 1024, 64)):
        seq = tokens // divided
        q, k, v, gradient = (_noise(device, rows, heads, seq, width) for _ in range(4))
        leaves = tuple(one.requires_grad_() for one in (q, k, v))

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        flops = 4.0 * rows * heads * seq * seq * width / 2
        name = f"attention, causal, {rows} × {heads} × {seq} × {width}"
        yield from _both_ways(name, forward, leaves, gradient, (flops, 2.5 * flops))


def _pointwise(divided: int, device: str) -> Iterator[Kernel]:
    tokens, width = 8192 // divided, 2048
    x, gradient = _noise(device, tokens, width).requires_grad_(), _noise(device, tokens, width)
    w = _noise(device, width).requires_grad_()
    wide = [_noise(device, tokens, 4 * width).requires_grad_() for _ in range(2)]
    wide_gradient = _noise(device, tokens, 4 * width)
    size, wide_size = 2.0 * tokens * width, 8.0 * tokens * width
    cases: Mapping[str, tuple[Callable[[], Tensor], tuple[Tensor, ...], Tensor, float, float]] = {
        "rms_norm": (
            lambda: functional.rms_norm(x, (width,), w), (x, w), gradient, 2 * size, 3 * size,
        ),
        "layer_norm": (
            lambda: functional.layer_norm(x, (width,), w, w), (x, w), gradient, 2 * size, 3 * size,
        ),
        "gelu": (
            lambda: functional.gelu(wide[0]),
            (wide[0],), wide_gradient, 2 * wide_size, 3 * wide_size,
        ),
        "silu · up": (
            lambda: functional.silu(wide[0]) * wide[1],
            tuple(wide), wide_gradient, 5 * wide_size, 8 * wide_size,
        ),
        "add": (lambda: x + gradient, (x,), gradient, 3 * size, 0.0),
        "dropout": (lambda: functional.dropout(x, 0.1), (x,), gradient, 2.5 * size, 2.5 * size),
    }  # fmt: skip
    for name, (forward, leaves, incoming, there, back) in cases.items():
        title = f"{name}, {tokens} × {leaves[0].shape[1]}"
        yield from _both_ways(title, forward, leaves, incoming, moved=(there, back))


def _both_ways(
    name: str,
    forward: Callable[[], Tensor],
    leaves: tuple[Tensor, ...],
    gradient: Tensor,
    flops: tuple[float, float] = (0.0, 0.0),
    moved: tuple[float, float] = (0.0, 0.0),
) -> Iterator[Kernel]:
    yield Kernel(name=f"{name}: forward", call=forward, flops=flops[0], moved_bytes=moved[0])
    made = forward()

    def backward() -> object:
        return torch.autograd.grad(made, leaves, gradient, retain_graph=True)

    yield Kernel(name=f"{name}: backward", call=backward, flops=flops[1], moved_bytes=moved[1])


def _losses(divided: int, device: str) -> Iterator[Kernel]:
    tokens, classes = 4096 // divided, 128256 // divided
    logits = _noise(device, tokens, classes).requires_grad_()
    targets = torch.randint(classes, (tokens,), device=device)
    one = torch.ones((), device=device)
    size = float(tokens * classes)
    ways: Mapping[str, tuple[Callable[[], Tensor], float, float]] = {
        "in bf16": (
            lambda: functional.cross_entropy(logits, targets).float(), 6 * size, 4 * size,
        ),
        "in float32": (
            lambda: functional.cross_entropy(logits.float(), targets), 18 * size, 14 * size,
        ),
    }  # fmt: skip
    for way, (forward, there, back) in ways.items():
        name = f"cross_entropy {way}, {tokens} × {classes}"
        yield from _both_ways(name, forward, (logits,), one, moved=(there, back))


def _optimizer(divided: int, device: str) -> Iterator[Kernel]:
    count = 10**9 // divided**2
    weights = [torch.nn.Parameter(torch.zeros(count // 100, device=device)) for _ in range(100)]
    for one in weights:
        one.grad = torch.full_like(one, 1e-3)
    step = torch.optim.AdamW(weights, lr=1e-6, fused=True)
    yield Kernel(name=f"AdamW, fused, {count:.0e}", call=step.step, moved_bytes=28.0 * count)
    halves = [torch.empty(count // 100, device=device, dtype=torch.bfloat16) for _ in range(100)]
    data = [one.data for one in weights]
    yield Kernel(
        name=f"_foreach_copy_ fp32 → bf16, {count:.0e}",
        call=lambda: torch._foreach_copy_(halves, data),
        moved_bytes=6.0 * count,
    )
    yield Kernel(
        name=f"_foreach_norm fp32, {count:.0e}",
        call=lambda: torch._foreach_norm(data),
        moved_bytes=4.0 * count,
    )
    big, other = (torch.empty(count, device=device) for _ in range(2))
    yield Kernel(
        name=f"copy fp32, {count:.0e}", call=lambda: big.copy_(other), moved_bytes=8.0 * count
    )


def _convolutions(divided: int, device: str) -> Iterator[Kernel]:
    """Yield convolutions of ResNet-50 in both layouts, without and with cudnn's benchmark mode."""
    rows = max(128 // divided, 1)
    shapes = ((64, 64, 3, 1, 56), (256, 64, 1, 1, 56), (256, 512, 1, 2, 56), (512, 512, 3, 1, 7))
    for is_searched in (False, True):
        torch.backends.cudnn.benchmark = is_searched
        for layout in (torch.contiguous_format, torch.channels_last):
            for inputs, outputs, kernel, stride, size in shapes:
                x = _noise(device, rows, inputs, size, size).to(memory_format=layout)
                w = _noise(device, outputs, inputs, kernel, kernel).to(memory_format=layout)
                leaves = (x.requires_grad_(), w.requires_grad_())

                def forward(
                    x: Tensor = x, w: Tensor = w, stride: int = stride, pad: int = kernel // 2
                ) -> Tensor:
                    return functional.conv2d(x, w, stride=stride, padding=pad)

                made = forward()
                flops = 2.0 * made.numel() * inputs * kernel**2
                name = f"conv {inputs} → {outputs}, {kernel}×{kernel}/{stride}, {size}²"
                name += ", NHWC" if layout is torch.channels_last else ", NCHW"
                name += ", benchmark" if is_searched else ""
                gradient = torch.randn_like(made)
                yield from _both_ways(name, forward, leaves, gradient, (flops, 2 * flops))
    torch.backends.cudnn.benchmark = False


def _noise(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


GROUPS: Mapping[str, Group] = {
    "products": _products,
    "unaligned products": _unaligned,
    "strided": _strided,
    "batch norms": _batch_norms,
    "pointwise": _pointwise,
    "attention": _attention,
    "losses": _losses,
    "optimizer": _optimizer,
    "convolutions": _convolutions,
}
