"""Turns a graph into rows for a JSON file, and such rows back into exactly the same graph.

Values without a JSON form are objects with one key: {"tensor": …} for a tensor as an argument,
{"dtype": …} for a dtype, {"size": …} for a size, {"float": …} for a float, so that every JSON tool
preserves 1.0 and infinity, {"complex": [real, imaginary]} for a complex number. A JSON list is a
tuple; {"list": […]}, {"map": …}, {"named": …} and {"fields": …} are a list, a dict, a namedtuple
and another object of the model. In a shape, a size is a number, or a list of coefficients if it
depends on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Le
from pydantic import JsonValue

from autopar.planner.errors import SourceSpan
from autopar.planner.files import FigureNumber, Rows, Share
from autopar.planner.graph.graph import BackwardFault, Graph, GraphBreak, OwnBackward
from autopar.planner.graph.ops import (
    Buffer,
    Constant,
    DType,
    Extent,
    Fields,
    FunctionCall,
    GradientUse,
    Listed,
    Mapped,
    ModuleCall,
    NamedFields,
    Op,
    OwnGradient,
    Parameter,
    Ref,
    StateChange,
    Tensor,
    TensorOrigin,
    Value,
)

Coefficient = Annotated[int, Ge(-(2**60)), Le(2**60)]
SizeRow = Coefficient | tuple[Coefficient, ...]


class OpRow(NamedTuple):
    """An op as a list."""

    name: str
    target: str
    arguments: tuple[tuple[str, JsonValue], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: str
    grad_enabled: bool
    writes: tuple[str, ...]
    spans: tuple[SourceSpan, ...] = ()


class TensorRow(NamedTuple):
    """A tensor as a list."""

    name: str
    shape: tuple[SizeRow, ...]
    dtype: str
    storage: str
    origin: TensorOrigin
    requires_grad: bool
    counted_by: str = ""
    expected: Share = 1.0


class ParameterRow(NamedTuple):
    """A parameter as a list."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[SizeRow, ...]
    dtype: str
    trainable: bool
    moments: FigureNumber = 2.0


class BufferRow(NamedTuple):
    """A buffer as a list."""

    name: str
    shape: tuple[SizeRow, ...]
    dtype: str
    persistent: bool
    updated: bool
    narrowed: bool


class CallRow(NamedTuple):
    """A module call as a list."""

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
    left: StateChange = StateChange.NOTHING
    mode_is_set: bool = False
    spans: tuple[SourceSpan, ...] = ()


class FunctionRow(NamedTuple):
    """A function call as a list."""

    module: str
    name: str
    call: str
    arguments: tuple[JsonValue, ...]
    keywords: tuple[tuple[str, JsonValue], ...]
    result: JsonValue
    ops: tuple[str, ...]
    spans: tuple[SourceSpan, ...] = ()


class OwnGradientRow(NamedTuple):
    """A place where the model uses gradients itself, as a list."""

    call: str
    use: GradientUse
    how: str
    where: str
    is_read: bool = False


class OwnBackwardRow(NamedTuple):
    """A backward that the model defines, with its fault, as a list."""

    name: str
    where: str
    fault: BackwardFault
    why: str


class GraphBreakRow(NamedTuple):
    """A line that torch.compile cannot trace, as a list."""

    paths: tuple[str, ...]
    where: str
    why: str


class ConstantRow(NamedTuple):
    """A constant as a list."""

    name: str
    values: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDocument:
    """A graph in a file: rows in the order of the graph."""

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
    lone_at: str = ""
    images: tuple[str, ...] = ()
    recomputed_at: str = ""
    autocast_at: str = ""
    devices_meet_at: str = ""
    was_noticed: bool
    functions: tuple[FunctionRow, ...] = ()
    own_gradients: tuple[OwnGradientRow, ...] = ()
    own_backwards: tuple[OwnBackwardRow, ...] = ()
    met_backwards: tuple[OpRow, ...] = ()
    in_eval_mode: tuple[str, ...] = ()
    breaks: tuple[GraphBreakRow, ...] = ()


def value_document(value: Value) -> JsonValue:
    """Return an argument as JSON."""
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
        case NamedFields():
            return {"named": [value_document(item) for item in value]}
        case Fields():
            return {"fields": [value_document(item) for item in value]}
        case tuple():
            return [value_document(item) for item in value]
    return value


def value_of(document: JsonValue) -> Value:
    """Return the argument that a JSON value represents; raises ValueError if invalid."""
    match document:
        case None | bool() | int() | str():
            return document
        case list() | tuple():  # pairs and arguments in a row are tuples
            return tuple(map(value_of, document))
        case {"list": list(items), **rest} if not rest:
            return Listed(map(value_of, items))
        case {"map": list(items), **rest} if not rest:
            return Mapped(map(value_of, items))
        case {"named": list(items), **rest} if not rest:
            return NamedFields(map(value_of, items))
        case {"fields": list(items), **rest} if not rest:
            return Fields(map(value_of, items))
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
    """Whether a value may stand for a float; other tools may have turned 1.0 into 1."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return is_number or number in ("inf", "-inf", "nan")


def _are_whole(sizes: list[JsonValue]) -> bool:
    return all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)


# For each field: the classes of its rows and objects, and the attribute that is a mapping's key.
_ROWS: Mapping[str, tuple[type[Any], type[Any], str]] = MappingProxyType(
    {
        "ops": (OpRow, Op, ""),
        "tensors": (TensorRow, Tensor, "name"),
        "parameters": (ParameterRow, Parameter, ""),
        "buffers": (BufferRow, Buffer, ""),
        "constants": (ConstantRow, Constant, "name"),
        "calls": (CallRow, ModuleCall, "key"),
        "functions": (FunctionRow, FunctionCall, ""),
        "own_gradients": (OwnGradientRow, OwnGradient, ""),
        "own_backwards": (OwnBackwardRow, OwnBackward, ""),
        "met_backwards": (OpRow, Op, ""),
        "breaks": (GraphBreakRow, GraphBreak, ""),
    }
)
_VALUES = ("arguments", "keywords", "result", "values")  # fields with nested arguments


def graph_document(graph: Graph) -> GraphDocument:
    """Return a graph as rows."""
    values = {field.name: getattr(graph, field.name) for field in fields(GraphDocument)}
    for name, (row, _, key) in _ROWS.items():
        things = values[name].values() if key else values[name]
        values[name] = tuple(_row(row, one) for one in things)
    return GraphDocument(**values)


def _row(kind: type[Any], thing: object) -> Any:
    values = {name: getattr(thing, name) for name in kind._fields}
    written = {name: value_document(value) for name, value in values.items() if name in _VALUES}
    if "shape" in values:
        sizes = (size.coefficients for size in values["shape"])
        written["shape"] = [own[0] if len(own) == 1 else own for own in sizes]
    return kind(**{**values, **written})


def graph_of(document: GraphDocument) -> Graph:
    """Return the graph that rows represent; raises ValueError if they do not."""
    values = {field.name: getattr(document, field.name) for field in fields(GraphDocument)}
    for name, (_, kind, key) in _ROWS.items():
        made = _each(name, kind, values[name])
        values[name] = MappingProxyType({getattr(one, key): one for one in made}) if key else made
    return Graph(**values)


def _each(field: str, kind: type[Any], rows: Iterable[Any]) -> tuple[Any, ...]:
    """Return the objects of rows; a fault is reported with its place."""
    made = []
    for number, row in enumerate(rows):
        try:
            made.append(_thing(kind, row))
        except ValueError as error:
            raise ValueError(f"graph.{field}.{number}: {error}") from None
    return tuple(made)


def _thing(kind: type[Any], row: Any) -> Any:
    values = row._asdict()
    read = {name: value_of(value) for name, value in values.items() if name in _VALUES}
    if "shape" in values:
        rows = values["shape"]
        read["shape"] = tuple(Extent((own,) if isinstance(own, int) else own) for own in rows)
    return kind(**{**values, **read})
