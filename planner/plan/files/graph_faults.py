"""Finds what in a graph contradicts itself: what a damaged or hand-edited file may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from keyword import iskeyword
from types import MappingProxyType

from autopar.planner.graph import Graph
from autopar.planner.ops import LOSS_CALL, MODEL_DTYPE, Buffer, Origin, Parameter, refs
from autopar.planner.precision import ITEM_BYTES


def graph_faults(graph: Graph) -> Iterator[str]:
    """Yield each contradiction, with the place of its row."""
    yield from _unknown(graph)
    yield from _out_of_order(graph)
    yield from _unlike_tensors(graph)
    yield from _own_ancestors(graph)
    yield from _unlike_schemas(graph)
    yield from _unlike_names(graph)
    for number, tensor in enumerate(graph.tensors.values()):
        if tensor.dtype not in ITEM_BYTES and tensor.dtype != MODEL_DTYPE:
            yield f"graph.tensors.{number}: {tensor.dtype!r} is no type of elements"
        if any(size.at(1) < 0 for size in tensor.shape):
            yield f"graph.tensors.{number}: a size of {tensor.name} is below 0"


def _unlike_tensors(graph: Graph) -> Iterator[str]:
    """Yield what is not as its tensor is: the inputs, and the sizes of parameters and buffers."""
    given = [one.name for one in graph.tensors.values() if one.origin is Origin.INPUT]
    if sorted(given) != sorted(graph.inputs):
        yield f"graph.inputs: the tensors from outside are {', '.join(map(repr, given))}"
    fields: dict[str, tuple[Parameter | Buffer, ...]] = {
        "parameters": graph.parameters,
        "buffers": graph.buffers,
    }
    for field, held in fields.items():
        for number, one in enumerate(held):
            tensor = graph.tensors.get(one.name)
            if tensor is not None and tensor.shape != one.shape:
                yield f"graph.{field}.{number}: other sizes than those of its tensor"


def _out_of_order(graph: Graph) -> Iterator[str]:
    """Yield each tensor that an op reads before it is made, or that is made twice."""
    made = {t.name for t in graph.tensors.values() if t.origin is not Origin.OP}
    for number, op in enumerate(graph.ops):
        if tuple(name for _, value in op.arguments for name in refs(value)) != op.inputs:
            yield f"graph.ops.{number}: the inputs of {op.name} are not those in its arguments"
        for name in op.inputs:
            if name not in made:
                yield f"graph.ops.{number}: {op.name} reads {name!r} before an op makes it"
        for name in op.outputs:
            if name in made:
                yield f"graph.ops.{number}: {op.name} makes {name!r}, which is there before"
        made |= set(op.outputs)
    if graph.loss not in made:
        yield f"graph.loss: no op makes {graph.loss!r}"


def _unlike_schemas(graph: Graph) -> Iterator[str]:
    """Yield each argument that its op has not, and each that it lacks; of torch's ops alone."""
    for number, op in enumerate(graph.ops):
        schema = _schema(op.target)
        if schema is None:
            continue
        names = [name for name, _ in op.arguments]
        for name in names:
            if name not in schema:
                yield f"graph.ops.{number}: {op.target} has no argument {name[:40]!r}"
        for name, has_default in schema.items():
            if name not in names and not has_default:
                yield f"graph.ops.{number}: the argument {name!r} of {op.target} is missing"


@cache
def _schema(target: str) -> Mapping[str, bool] | None:
    """Return the arguments of an op, and whether each has a default; None where nobody knows."""
    from torch._C import _get_schema  # here alone: it takes seconds

    name, _, overload = target.replace(".", "::", 1).rpartition(".")
    try:
        schema = _get_schema(name, "" if overload == "default" else overload)
    except (RuntimeError, TypeError):
        return None
    return MappingProxyType({one.name: one.has_default_value() for one in schema.arguments})


def _unlike_names(graph: Graph) -> Iterator[str]:
    """Yield each argument of a call that Python could not name so."""
    calls = [(f"graph.calls.{n}", one.keywords) for n, one in enumerate(graph.calls.values())]
    calls += [(f"graph.functions.{n}", one.keywords) for n, one in enumerate(graph.functions)]
    for where, keywords in calls:
        for name, _ in keywords:
            if not name.isidentifier() or iskeyword(name):
                yield f"{where}: {name[:40]!r} is no name of an argument"


def _own_ancestors(graph: Graph) -> Iterator[str]:
    """Yield a call that is inside itself."""
    known: set[str] = set()
    for start in graph.calls:
        above: list[str] = []
        key: str | None = start
        while key is not None and key in graph.calls and key not in known:
            if key in above:
                yield f"graph.calls: {key!r} is called by itself"
                return
            above.append(key)
            key = graph.calls[key].parent
        known |= set(above)


def _unknown(graph: Graph) -> Iterator[str]:
    """Yield the names that nothing has; the loss function's call is no row."""
    for number, op in enumerate(graph.ops):
        if op.target.count(".") != 2:
            yield f"graph.ops.{number}: {op.target[:40]!r} is no op, such as aten.add.Tensor"
        if op.call not in graph.calls and op.call != LOSS_CALL:
            yield f"graph.ops.{number} names the call {op.call[:40]!r}, which is not there"
    for number, call in enumerate(graph.calls.values()):
        if call.parent is not None and call.parent not in graph.calls:
            yield f"graph.calls.{number} names the call {call.parent[:40]!r}, which is not there"
    ops = {op.name for op in graph.ops}
    for number, function in enumerate(graph.functions):
        if not function.ops:
            yield f"graph.functions.{number}: {function.name[:40]!r} runs no op"
        for name in function.ops:
            if name not in ops:
                yield f"graph.functions.{number} names the op {name[:40]!r}, which is not there"
    parameters = tuple(parameter.name for parameter in graph.parameters)
    named = [
        ("", (graph.loss, *graph.inputs, *parameters)),
        *((f".ops.{i}", (*op.inputs, *op.outputs, *op.writes)) for i, op in enumerate(graph.ops)),
        *((f".tensors.{i}", (one.storage,)) for i, one in enumerate(graph.tensors.values())),
    ]
    for where, names in named:
        for name in names:
            if name not in graph.tensors:
                yield f"graph{where} names the tensor {name!r}, which is not there"
