"""Turns a graph into rows for a JSON file, and such rows back into exactly the same graph.

What JSON has no word for stands as an object of one key: {"tensor": …} for a tensor as an argument,
{"dtype": …} for an element type, {"size": …} for a size, {"float": …} for a float, so that 1.0 and
infinity survive every JSON tool, {"complex": [real, imaginary]} for two of them. Lists are tuples;
{"list": […]} is what the model has as a list. A size is a number, or the list of its coefficients
where it depends on the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

from annotated_types import Ge, Le
from pydantic import JsonValue

from autopar.planner.extent import Extent
from autopar.planner.graph import Graph
from autopar.planner.numbers import Figure, Rows, Share
from autopar.planner.ops import (
    Buffer,
    Call,
    Constant,
    DType,
    FunctionCall,
    Listed,
    Mapped,
    Op,
    Origin,
    Parameter,
    Ref,
    Tensor,
    Value,
)
from autopar.planner.plan.files.graph_faults import graph_faults

Row = TypeVar("Row")
Made = TypeVar("Made")
Coefficient = Annotated[int, Ge(-(2**60)), Le(2**60)]
SizeRow = Coefficient | tuple[Coefficient, ...]


class OpRow(NamedTuple):
    """One op as a list."""

    name: str
    target: str
    arguments: tuple[tuple[str, JsonValue], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: str
    location: str
    grad_enabled: bool
    writes: tuple[str, ...]


class TensorRow(NamedTuple):
    """One tensor as a list."""

    name: str
    shape: tuple[SizeRow, ...]
    dtype: str
    storage: str
    origin: Origin
    requires_grad: bool
    counted_by: str = ""
    expected: Share = 1.0


class ParameterRow(NamedTuple):
    """One parameter as a list."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[SizeRow, ...]
    dtype: str
    trainable: bool
    moments: Figure = 2.0


class BufferRow(NamedTuple):
    """One buffer as a list."""

    name: str
    shape: tuple[SizeRow, ...]
    dtype: str
    persistent: bool
    updated: bool


class CallRow(NamedTuple):
    """One call of a module as a list."""

    key: str
    path: str
    class_name: str
    is_function: bool
    parent: str | None
    arguments: tuple[JsonValue, ...]
    keywords: tuple[tuple[str, JsonValue], ...]
    result: JsonValue
    has_unused: bool = False
    is_batch_norm: bool = False


class FunctionRow(NamedTuple):
    """One call of a plain function as a list."""

    module: str
    name: str
    call: str
    arguments: tuple[JsonValue, ...]
    keywords: tuple[tuple[str, JsonValue], ...]
    result: JsonValue
    ops: tuple[str, ...]


class ConstantRow(NamedTuple):
    """One constant as a list."""

    name: str
    values: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDocument:
    """A graph as it lies in a file: rows in the order of the graph."""

    loss: str
    fixed_batch: Rows | None
    inputs: tuple[str, ...]
    ops: tuple[OpRow, ...]
    tensors: tuple[TensorRow, ...]
    parameters: tuple[ParameterRow, ...]
    buffers: tuple[BufferRow, ...]
    constants: tuple[ConstantRow, ...]
    calls: tuple[CallRow, ...]
    fixed_at: str = ""
    recomputed_at: str = ""
    autocast_at: str = ""
    devices_meet_at: str = ""
    was_noticed: bool = True  # in files that do not tell
    functions: tuple[FunctionRow, ...] = ()


def value_document(value: Value) -> JsonValue:
    """Return an argument in JSON."""
    match value:
        case Ref():
            return {"tensor": value.tensor}
        case DType():
            return {"dtype": value.name}
        case Extent():
            return {"size": list(value.coefficients)}
        case float():
            return {"float": value if math.isfinite(value) else str(value)}
        case complex():
            return {"complex": [value_document(value.real), value_document(value.imag)]}
        case Listed():
            return {"list": [value_document(item) for item in value]}
        case Mapped():
            return {"map": [value_document(item) for item in value]}
        case tuple():
            return [value_document(item) for item in value]
    return value


def value_of(document: JsonValue) -> Value:
    """Return the argument that a JSON value stands for; ValueError where there is none."""
    match document:
        case None | bool() | int() | str():
            return document
        case list():
            return tuple(map(value_of, document))
        case {"list": list(items), **rest} if not rest:
            return Listed(map(value_of, items))
        case {"map": list(items), **rest} if not rest:
            return Mapped(map(value_of, items))
        case {"tensor": str(name), **rest} if not rest:
            return Ref(name)
        case {"dtype": str(name), **rest} if not rest:
            return DType(name)
        case {"size": list(sizes), **rest} if not rest and _are_whole(sizes):
            return Extent(tuple(int(str(size)) for size in sizes))
        case {"float": number, **rest} if not rest and _is_float(number):
            return float(str(number))
        case {"complex": [real, imaginary], **rest} if not rest:
            parts = value_of(real), value_of(imaginary)
            if isinstance(parts[0], float) and isinstance(parts[1], float):
                return complex(parts[0], parts[1])
    raise ValueError(f"{str(document)[:60]} is not an argument of an op")


def _is_float(number: JsonValue) -> bool:
    """Whether this is a float as it is written; other tools may have made 1 of 1.0."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return is_number or number in ("inf", "-inf", "nan")


def _are_whole(sizes: list[JsonValue]) -> bool:
    return all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)


def graph_document(graph: Graph) -> GraphDocument:
    """Return a graph as rows."""
    return GraphDocument(
        loss=graph.loss,
        fixed_batch=graph.fixed_batch,
        fixed_at=graph.fixed_at,
        recomputed_at=graph.recomputed_at,
        autocast_at=graph.autocast_at,
        devices_meet_at=graph.devices_meet_at,
        was_noticed=graph.was_noticed,
        inputs=graph.inputs,
        ops=tuple(map(_op_row, graph.ops)),
        tensors=tuple(map(_tensor_row, graph.tensors.values())),
        parameters=tuple(
            ParameterRow(p.name, p.aliases, _shape_row(p.shape), p.dtype, p.trainable, p.moments)
            for p in graph.parameters
        ),
        buffers=tuple(
            BufferRow(b.name, _shape_row(b.shape), b.dtype, b.persistent, b.updated)
            for b in graph.buffers
        ),
        constants=tuple(
            ConstantRow(c.name, value_document(c.values)) for c in graph.constants.values()
        ),
        calls=tuple(map(_call_row, graph.calls.values())),
        functions=tuple(map(_function_row, graph.functions)),
    )


def _op_row(op: Op) -> OpRow:
    return OpRow(
        op.name,
        op.target,
        tuple((name, value_document(value)) for name, value in op.arguments),
        op.inputs,
        op.outputs,
        op.call,
        op.location,
        op.grad_enabled,
        op.writes,
    )


def _tensor_row(tensor: Tensor) -> TensorRow:
    return TensorRow(
        tensor.name,
        _shape_row(tensor.shape),
        tensor.dtype,
        tensor.storage,
        tensor.origin,
        tensor.requires_grad,
        tensor.counted_by,
        tensor.expected,
    )


def _call_row(call: Call) -> CallRow:
    return CallRow(
        call.key,
        call.path,
        call.class_name,
        call.is_function,
        call.parent,
        tuple(map(value_document, call.arguments)),
        tuple((name, value_document(value)) for name, value in call.keywords),
        value_document(call.result),
        call.has_unused,
        call.is_batch_norm,
    )


def _function_row(function: FunctionCall) -> FunctionRow:
    return FunctionRow(
        function.module,
        function.name,
        function.call,
        tuple(map(value_document, function.arguments)),
        tuple((name, value_document(value)) for name, value in function.keywords),
        value_document(function.result),
        function.ops,
    )


def _shape_row(shape: tuple[Extent, ...]) -> tuple[SizeRow, ...]:
    return tuple(s.coefficients[0] if len(s.coefficients) == 1 else s.coefficients for s in shape)


def _shape(rows: tuple[SizeRow, ...]) -> tuple[Extent, ...]:
    return tuple(Extent((row,) if isinstance(row, int) else row) for row in rows)


def graph_of(document: GraphDocument) -> Graph:
    """Return the graph that rows stand for; ValueError where they do not make one."""
    for fault in _doubled(document):
        raise ValueError(fault)
    graph = Graph(
        ops=_each("ops", _op, document.ops),
        tensors=_by("name", map(_tensor, document.tensors)),
        parameters=tuple(
            Parameter(**{**row._asdict(), "shape": _shape(row.shape)})
            for row in document.parameters
        ),
        buffers=tuple(
            Buffer(**{**row._asdict(), "shape": _shape(row.shape)}) for row in document.buffers
        ),
        constants=_by("name", _each("constants", _constant, document.constants)),
        inputs=document.inputs,
        calls=_by("key", _each("calls", _call, document.calls)),
        functions=_each("functions", _function, document.functions),
        loss=document.loss,
        fixed_batch=document.fixed_batch,
        fixed_at=document.fixed_at,
        recomputed_at=document.recomputed_at,
        autocast_at=document.autocast_at,
        devices_meet_at=document.devices_meet_at,
        was_noticed=document.was_noticed,
    )
    for fault in graph_faults(graph):
        raise ValueError(fault)
    return graph


def _each(field: str, make: Callable[[Row], Made], rows: Iterable[Row]) -> tuple[Made, ...]:
    """Return what is made of rows; what is wrong with one is told with its place."""
    made: list[Made] = []
    for number, row in enumerate(rows):
        try:
            made.append(make(row))
        except ValueError as error:
            raise ValueError(f"graph.{field}.{number}: {error}") from None
    return tuple(made)


def _by(name: str, made: Iterable[Made]) -> Mapping[str, Made]:
    return MappingProxyType({getattr(one, name): one for one in made})


def _constant(row: ConstantRow) -> Constant:
    return Constant(name=row.name, values=value_of(row.values))


def _op(row: OpRow) -> Op:
    arguments = tuple((name, value_of(value)) for name, value in row.arguments)
    return Op(**{**row._asdict(), "arguments": arguments})


def _tensor(row: TensorRow) -> Tensor:
    return Tensor(**{**row._asdict(), "shape": _shape(row.shape)})


def _call(row: CallRow) -> Call:
    return Call(**{**row._asdict(), **_crossing(row)})


def _function(row: FunctionRow) -> FunctionCall:
    return FunctionCall(**{**row._asdict(), **_crossing(row)})


def _crossing(row: CallRow | FunctionRow) -> dict[str, Any]:
    """Return what goes into a call and comes out of it."""
    return {
        "arguments": tuple(map(value_of, row.arguments)),
        "keywords": tuple((name, value_of(value)) for name, value in row.keywords),
        "result": value_of(row.result),
    }


def _doubled(document: GraphDocument) -> Iterator[str]:
    names = {
        "ops": [row.name for row in document.ops],
        "tensors": [row.name for row in document.tensors],
        "parameters": [row.name for row in document.parameters],
        "buffers": [row.name for row in document.buffers],
        "constants": [row.name for row in document.constants],
        "calls": [row.key for row in document.calls],
        "inputs": list(document.inputs),
    }
    for field, own in names.items():
        for name, times in Counter(own).items():
            if times > 1:
                yield f"graph.{field}: {name!r} is there {times} times"
