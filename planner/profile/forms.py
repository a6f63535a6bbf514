"""Finds how the tensors of a graph lie in memory on a device: strides from a run without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.planner.extent import Extent
from autopar.planner.graph import Graph
from autopar.planner.ops import MODEL_DTYPE, DType, Op, Origin, Ref, Value
from autopar.planner.precision import Precision

_OWN: Mapping[Precision, torch.dtype] = MappingProxyType(
    {
        Precision.FP32: torch.float32,
        Precision.BF16: torch.bfloat16,
        Precision.FP16: torch.float16,
    }
)
# What a graph may hold that a run without values cannot do: sizes that depend on data.
_CANNOT = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError)


def strides_of(
    graph: Graph, *, batch: int, precision: Precision, device: str
) -> Mapping[str, tuple[int, ...]]:
    """Return the strides of every tensor; what an op's kernel decides is decided by torch itself.

    Where an op cannot run without values, its results are taken to be contiguous.
    """
    strides: dict[str, tuple[int, ...]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        values = {
            name: _empty(graph, name, batch, precision, device)
            for name, tensor in graph.tensors.items()
            if tensor.origin is not Origin.OP
        }
        for op in graph.ops:
            made = _results(op, graph, values, batch=batch, precision=precision, device=device)
            values.update(zip(op.outputs, made, strict=True))
        strides.update((name, tuple(value.stride())) for name, value in values.items())
    return strides


def torch_dtype(name: str, precision: Precision) -> torch.dtype:
    """Return the element type that a graph's name means in training."""
    if name == MODEL_DTYPE:
        return _OWN[precision]
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def callable_of(op: Op) -> Any:
    """Return the function of torch that an op calls."""
    found: Any = torch.ops
    for part in op.target.split("."):
        found = getattr(found, part)
    return found


def arguments_of(
    op: Op, tensors: Mapping[str, Any], *, batch: int, precision: Precision, device: str
) -> dict[str, Any]:
    """Return the arguments of an op by name, with these tensors in their places."""

    def plain(key: str, value: Value) -> Any:
        if isinstance(value, Ref):
            return tensors[value.tensor]
        if isinstance(value, Extent):
            return value.at(batch)
        if isinstance(value, DType):
            return torch_dtype(value.name, precision)
        if isinstance(value, tuple):
            return [plain(key, item) for item in value]
        return device if key == "device" and value is not None else value

    return {key: plain(key, value) for key, value in op.arguments}


def results_of(result: Any) -> list[Any]:
    """Return the tensors that a call gave."""
    many = result if isinstance(result, (tuple, list)) else (result,)
    return [one for one in many if isinstance(one, torch.Tensor)]


def _results(
    op: Op,
    graph: Graph,
    values: Mapping[str, Any],
    *,
    batch: int,
    precision: Precision,
    device: str,
) -> Sequence[Any]:
    expected = [_shape(graph, name, batch) for name in op.outputs]
    try:
        arguments = arguments_of(op, values, batch=batch, precision=precision, device=device)
        made = results_of(callable_of(op)(**arguments))[: len(op.outputs)]
    except _CANNOT:
        made = []
    if [tuple(one.shape) for one in made] == expected:
        return made
    return [_empty(graph, name, batch, precision, device) for name in op.outputs]


def _shape(graph: Graph, name: str, batch: int) -> tuple[int, ...]:
    return tuple(size.at(batch) for size in graph.tensors[name].shape)


def _empty(graph: Graph, name: str, batch: int, precision: Precision, device: str) -> torch.Tensor:
    dtype = torch_dtype(graph.tensors[name].dtype, precision)
    return torch.empty(_shape(graph, name, batch), dtype=dtype, device=device)


def local_strides(
    shape: Sequence[int], strides: Sequence[int], local: Sequence[int]
) -> tuple[int, ...]:
    """Return the strides of a rank's part of a tensor that is laid out like the whole.

    The order of the dims stays, and so do gaps: where a row of the whole takes three times its own
    length (the query inside a fused matrix), a row of the part takes three times its own.
    """
    placed: dict[int, int] = {}
    whole_end = local_end = 1
    for dim in _inner_to_outer(shape, strides):
        if strides[dim] == 0:
            placed[dim] = 0
            continue
        gap = max(1, strides[dim] // max(1, whole_end)) if shape[dim] > 1 else 1
        placed[dim] = local_end * gap
        whole_end, local_end = strides[dim] * shape[dim], placed[dim] * local[dim]
    return tuple(placed[dim] for dim in range(len(shape)))


def _inner_to_outer(shape: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    yield from sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim], -dim))
