"""Lists the distinct ops of a graph to measure, and the strides of their tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.planner.costs.ops.case import LocalShapes, OpSplit
from autopar.planner.costs.ops.measurements import OpKey
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import MODEL_DTYPE, DType, Extent, Op, Ref, TensorOrigin, Value, refs
from autopar.planner.precision import Precision, item_bytes
from autopar.planner.programs.layouts.strategies import strategies
from autopar.planner.rules.rule import Traffic
from autopar.planner.rules.table import rule_of

# Errors of ops that need values, for example because the result's size depends on data.
_CANNOT = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError)


def strides_of(
    graph: Graph, *, batch: int, precision: Precision, device: str
) -> Mapping[str, tuple[int, ...]]:
    """Return the strides of every tensor, as torch gives them when each op runs on fake tensors.

    If an op cannot run without values, its results are assumed to be contiguous.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        values = {
            name: _empty(graph, name, batch, precision, device)
            for name, tensor in graph.tensors.items()
            if tensor.origin is not TensorOrigin.OP
        }
        for op in graph.ops:
            made = _results(op, graph, values, batch=batch, precision=precision, device=device)
            values.update(zip(op.outputs, made, strict=True))
        return {name: tuple(value.stride()) for name, value in values.items()}


def torch_dtype(name: str, precision: Precision) -> torch.dtype:
    """Return torch's dtype for a name in the graph; MODEL_DTYPE is that of the training."""
    found = getattr(torch, precision.torch_name if name == MODEL_DTYPE else name)
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
    """Return the arguments of an op by name, with tensors from `tensors` and plain values."""

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
    """Return the tensors among the results of a call."""
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
    """Return the strides of a rank's part of a tensor, which lies in memory like the whole tensor.

    The order of dims and the gaps are the same: if a row of the whole takes three times its length
    (the query inside a fused matrix), a row of the part takes three times its own.
    """
    placed: dict[int, int] = {}
    whole_end = local_end = 1
    inner_to_outer = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim], -dim))
    for dim in inner_to_outer:
        if strides[dim] == 0:
            placed[dim] = 0
            continue
        gap = max(1, strides[dim] // max(1, whole_end)) if shape[dim] > 1 else 1
        placed[dim] = local_end * gap
        whole_end, local_end = strides[dim] * shape[dim], placed[dim] * local[dim]
    return tuple(placed[dim] for dim in range(len(shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandForm:
    """A tensor that a probe reads, in the form that it has in training."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_weight: bool  # not in the cache: last used a step ago; others were just written
    below: int  # its integers are smaller than this: rows of a table, classes
    spacing: int = 0  # if not 0, the integers rise by it from 0: the starts of bags


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An op on one rank, ready to be called; it stands for `uses` ops and splits with its key."""

    key: OpKey
    op: Op
    split: OpSplit | None
    operands: tuple[OperandForm, ...]
    results: tuple[tuple[int, ...], ...]
    is_differentiable: bool
    batch: int
    groups: int | None  # of a convolution on one rank
    uses: int
    expected_seconds: float  # of one forward and backward, by formula
    size_bytes: int  # of its tensors, and as many for their gradients


def find_probes(pricer: OpPricer, *, degrees: Sequence[int]) -> tuple[Probe, ...]:
    """Return a probe per key, unsplit ops first; some ops need none (`_needs_no_probe`)."""
    # the first op of each key, and how it is split
    whole: dict[OpKey, tuple[Op, OpSplit | None]] = {}
    split: dict[OpKey, tuple[Op, OpSplit | None]] = {}
    uses = Counter[OpKey]()
    for op in pricer.graph.ops:
        for division in (None, *_splits(op, pricer, degrees)):
            if _needs_no_probe(pricer, op, division):
                continue
            key = pricer.key(op, division)
            uses[key] += 1
            (split if division else whole).setdefault(key, (op, division))
    strides = strides_of(
        pricer.graph,
        batch=pricer.batch,
        precision=pricer.precision,
        device=pricer.device.torch_name,
    )
    found = {**split, **whole}  # a split that changes no size has the key of the unsplit op
    order = [*whole, *(key for key in split if key not in whole)]
    return tuple(_probe(pricer, key, *found[key], strides, uses[key]) for key in order)


def _splits(op: Op, pricer: OpPricer, degrees: Sequence[int]) -> Iterator[OpSplit]:
    for degree in degrees:
        if degree == 1:
            continue
        ways = strategies(op, pricer.graph, pricer.axes, degree=degree, batch=pricer.batch)
        for letter, axis in dict.fromkeys((way.letter, way.axis) for way in ways):
            if letter:
                yield OpSplit(letter=letter, axis=axis, degree=degree)


def _needs_no_probe(pricer: OpPricer, op: Op, split: OpSplit | None) -> bool:
    """Whether an op needs no probe: it is a view, which takes no time, or ranks do not run it.

    For a split table or a split loss, ranks call functions of the runtime, whose time differs from
    the plain op's.
    """
    form = pricer.shapes(op, split).form
    if form is not None and form.function:
        return True
    cost = pricer.cost(op, split)
    return cost.forward_seconds + cost.backward_seconds == 0.0


def _probe(
    pricer: OpPricer,
    key: OpKey,
    op: Op,
    split: OpSplit | None,
    strides: Mapping[str, tuple[int, ...]],
    uses: int,
) -> Probe:
    shapes, cost, tensors = pricer.shapes(op, split), pricer.cost(op, split), pricer.graph.tensors
    return Probe(
        key=key,
        op=op,
        split=split,
        operands=tuple(_operand(pricer, shapes, name, strides[name]) for name in op.inputs),
        results=tuple(map(shapes.shape, op.outputs)),
        is_differentiable=pricer.graph.learns(op),
        batch=pricer.batch,
        groups=shapes.letters("g") if split and "groups" in dict(op.arguments) else None,
        uses=uses,
        expected_seconds=cost.forward_seconds + cost.backward_seconds,
        size_bytes=sum(
            2 * prod(shapes.shape(name)) * item_bytes(tensors[name].dtype, pricer.precision)
            for name in (*op.inputs, *op.outputs)
        ),
    )


def _operand(
    pricer: OpPricer, shapes: LocalShapes, name: str, strides: tuple[int, ...]
) -> OperandForm:
    tensor = pricer.graph.tensors[name]
    whole = tuple(size.at(pricer.batch) for size in tensor.shape)
    local = shapes.shape(name)
    origin = pricer.graph.tensors[tensor.storage].origin
    return OperandForm(
        name=name,
        shape=local,
        strides=strides if local == whole else local_strides(whole, strides, local),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        is_weight=origin in (TensorOrigin.PARAMETER, TensorOrigin.BUFFER, TensorOrigin.CONSTANT),
        below=_below(shapes),
        spacing=_spacing(shapes, name),
    )


def _below(shapes: LocalShapes) -> int:
    """Return the exclusive upper limit of integer inputs, so that each is a valid index."""
    rule = rule_of(shapes.op.target)
    sizes = shapes.shape(shapes.op.inputs[0]) if shapes.op.inputs else ()
    if rule.kind.reads_table:
        return sizes[0]
    if rule.kind.is_class_loss:
        return sizes[1 if len(sizes) > 1 else 0]
    if rule.traffic is Traffic.GATHERED:
        dim = dict(shapes.op.arguments).get("dim")
        return sizes[dim] if isinstance(dim, int) else min(sizes, default=1)
    return 2


def _spacing(shapes: LocalShapes, name: str) -> int:
    """Return the number of entries per bag for the tensor of bags' starts, 0 for others."""
    given = dict(shapes.op.arguments)
    if name not in refs(given.get("offsets")):
        return 0
    entries = next(refs(given.get("indices")))
    return max(1, shapes.numel(entries) // max(1, shapes.numel(name)))
