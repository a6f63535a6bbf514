"""Sends every kind of message that scripts send, in a world of one process, and compares.

In a world of one, each message returns what was sent. So this only shows that nccl takes each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.data_parallel.averaging import Averaging, ComingMean
from autopar.runtime.ranks import transport
from autopar.runtime.ranks.mesh import ALONE, Axis
from autopar.runtime.tensor import collectives
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.joining import axis_of_one, joined_alone
from benchmarks.on_gpu.report import Cell, Row

TABLE = "Ranks: each message, in a world of one"
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)

Message: TypeAlias = Callable[[Tensor, Axis], Tensor]


def transport_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each function."""
    for cells in context.alone(_all_messages, context.device, seconds=90):
        yield Row(table=TABLE, cells=cells)


def _all_messages(device: str) -> list[dict[str, Cell]]:
    with joined_alone(device):
        axis = axis_of_one()
        plain = [_sent(name, message, axis, device) for name, message in MESSAGES.items()]
        differentiable = [_through(name, device, axis) for name in CONVERSIONS]
        return [*plain, *differentiable, _objects()]


def _started_gather(x: Tensor, axis: Axis) -> Tensor:
    flat = x.clone().view(-1)
    work = transport.started_gather(flat, axis)
    assert work is not None
    work.wait()
    return flat.view_as(x)


def _pieces(x: Tensor, axis: Axis) -> Tensor:
    (found,) = transport.exchanged_pieces([x], [x.shape], axis)
    return found


def _mean(x: Tensor, axis: Axis) -> Tensor:
    flat = x.clone().view(-1)
    return ComingMean(flat, Averaging(shard=axis, replica=ALONE)).value().view_as(x)


def _compressed_mean(x: Tensor, axis: Axis) -> Tensor:
    wire = torch.bfloat16 if x.dtype is torch.float32 else None
    flat = x.clone().view(-1)
    return (
        ComingMean(flat, Averaging(shard=ALONE, replica=axis, wire_dtype=wire)).value().view_as(x)
    )


def _most(x: Tensor, axis: Axis) -> Tensor:
    most = x.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=axis.group)
    return most


MESSAGES: Mapping[str, Message] = {
    "summed": transport.summed,
    "gathered": lambda x, axis: transport.gathered(x, axis)[0],
    "sum_scattered": lambda x, axis: transport.sum_scattered(x[None], axis)[0],
    "exchanged": lambda x, axis: transport.exchanged(x[None], axis)[0],
    "exchanged_pieces": _pieces,
    "ComingSum": lambda x, axis: transport.ComingSum(x.clone(), axis).value(),
    "ComingPart": lambda x, axis: transport.ComingPart(x.clone().view(-1), axis).value().view_as(x),
    "started_gather": _started_gather,
    "ComingMean over shards": _mean,
    "ComingMean over copies, in bf16": _compressed_mean,
    "all_reduce MAX": _most,
}
CONVERSIONS = (
    "sum_gradients", "sum_partials", "sum_both", "scatter_sum", "gather", "gather_whole",
    "take_shard", "take_own", "place_own", "exchange", "first_only", "first_whole",
    "first_gradient",
)  # fmt: skip


def _sent(name: str, message: Message, axis: Axis, device: str) -> dict[str, Cell]:
    began = time.perf_counter()
    wrong = []
    for dtype in TYPES[: len(TYPES) - name.startswith("ComingMean")]:  # integers have no mean
        x = torch.arange(24, device=device).view(4, 6).to(dtype)
        for given in (x, x.t()) if name in ("summed", "gathered", "sum_scattered") else (x,):
            try:
                if not torch.equal(message(given, axis), given):
                    wrong.append(f"{dtype}: another value")
            except Exception as error:
                wrong.append(f"{dtype}: {str(error).splitlines()[0]}")
    return _cells(name, wrong, began)


def _through(name: str, device: str, axis: Axis) -> dict[str, Cell]:
    """Send a tensor forward and its gradient backward through a conversion of layouts."""
    began = time.perf_counter()
    x = torch.arange(24.0, device=device).view(4, 6).requires_grad_()
    plain = ("sum_gradients", "sum_partials", "sum_both", "first_only", "first_whole")
    dims = () if name in (*plain, "first_gradient") else (0, 1) if name == "exchange" else (1,)
    try:
        y = getattr(collectives, name)(x, *dims, axis)
        (gradient,) = torch.autograd.grad(y, x, 2 * x.detach())
        is_right = torch.equal(y, x) and torch.equal(gradient, 2 * x)
        wrong = [] if is_right else ["another value"]
    except Exception as error:
        wrong = [str(error).splitlines()[0]]
    return _cells(f"collectives.{name}", wrong, began)


def _objects() -> dict[str, Cell]:
    began = time.perf_counter()
    found: list[object] = [None]
    dist.all_gather_object(found, {"a": 1})
    return _cells("all_gather_object", [] if found == [{"a": 1}] else [f"{found}"], began)


def _cells(name: str, wrong: list[str], began: float) -> dict[str, Cell]:
    seconds = time.perf_counter() - began
    return {"message": name, "found": "; ".join(wrong) or "as sent", "seconds": seconds}
