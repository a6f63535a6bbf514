"""Prints the call of a plain function of the model, where it computes what it did in the trace."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.codegen.forward.at_hand import AtHand
from autopar.codegen.forward.call_arguments import printed_argument
from autopar.codegen.forward.opening.changes import is_changed
from autopar.codegen.forward.opening.mistaken_sizes import may_read_parts
from autopar.codegen.forward.reading.imported import Imported, is_free
from autopar.codegen.forward.reading.modules import functions_at_hand, size_reading_functions
from autopar.codegen.forward.reading.results import pairs
from autopar.codegen.forward.text.expressions import (
    Expression,
    Held,
    call,
)
from autopar.codegen.forward.text.lines import Line, Pattern
from autopar.planner.extent import Extent
from autopar.planner.layouts import WHOLE, Kind, Layout
from autopar.planner.ops import (
    LOSS_FUNCTION,
    DType,
    FunctionCall,
    Mapped,
    Op,
    Origin,
    Ref,
    Value,
    refs,
)
from autopar.planner.rules.random_ops import is_random

LOSS = "new_loss"  # as scripts call the model file's
_Needs = dict[str, tuple[str, Layout, Op | None]]  # of an argument: what to give, how, and to whom
_KEPT = (Origin.PARAMETER, Origin.BUFFER)


def function_line(function: FunctionCall, ops: Sequence[Op], body: AtHand) -> Line | None:
    """Return the call of a function that runs some ops, None where they must be printed."""
    name = _name(function, body)
    values = (*function.arguments, *(value for _, value in function.keywords))
    if not name or not all(map(_is_plain, values)) or not _is_kept(function, ops, body):
        return None
    is_told = any(map(_has_size, values))
    if (is_told or _reads_sizes(function, body)) and may_read_parts(ops, body.split):
        return None
    needs = _needs(function, ops, body)
    if needs is None:
        return None
    other = body.split.lengths.function(function)
    arguments = [
        _argument(value, needs, body, more)
        for value, more in zip(function.arguments, other.arguments, strict=True)
    ]
    keywords = tuple(
        (key, _argument(value, needs, body, more))
        for (key, value), (_, more) in zip(function.keywords, other.keywords, strict=True)
    )
    made = {tensor for op in ops for tensor in op.outputs}
    return Line(
        results=_pattern(function.result, made, body),
        expression=call(name, *arguments, keywords=keywords),
        hint=function.name,
        names=tuple(body.tree.named.get(tensor, "") for tensor in refs(function.result)),
        function=name,
    )


def _place(function: FunctionCall) -> tuple[str, str]:
    return function.module, function.name


def _imported(function: FunctionCall) -> Imported:
    return Imported(module=function.module, qualname=function.name, name=function.name)


def _reads_sizes(function: FunctionCall, body: AtHand) -> bool:
    if _place(function) == LOSS_FUNCTION:
        return True
    return _imported(function) in size_reading_functions(body.split.modules)


def _has_size(value: Value) -> bool:
    """Whether an argument has a number that may be the size of a tensor."""
    if isinstance(value, tuple):
        return any(map(_has_size, _items(value)))
    return isinstance(value, Extent) or type(value) is int


def _name(function: FunctionCall, body: AtHand) -> str:
    """Return the name of a function in the script, nothing where the script cannot have it."""
    if _place(function) == LOSS_FUNCTION:
        return LOSS
    known, place = functions_at_hand(body.split.modules), _imported(function)
    others = [one for one in known if one.name == place.name and one != place]
    is_taken = others or place.name in (*body.arguments.values(), *body.unpacked)
    return place.name if place in known and not is_taken and is_free(place.name) else ""


def _is_plain(value: Value) -> bool:
    """Whether printed code can give an argument: tensors and numbers, alone or in containers."""
    if isinstance(value, tuple):
        return all(map(_is_plain, _items(value)))
    return value is None or isinstance(value, (Ref, DType, Extent, bool, int, float))


def _items(value: tuple[Value, ...]) -> Sequence[Value]:
    return [item for _, item in pairs(value)] if isinstance(value, Mapped) else value


def _is_kept(function: FunctionCall, ops: Sequence[Op], body: AtHand) -> bool:
    """Whether the function does on this rank what its ops are planned to do."""
    split = body.split
    made = {tensor for op in ops for tensor in op.outputs}
    layouts = [split.made(tensor) for tensor in made]
    if any(layout.kind is Kind.PARTIAL for layout in layouts):
        return False
    if any(_is_special(op, body) for op in ops):
        return False
    if any(
        name in made and len(split.way(op, i)) > 1 for op in ops for i, name in enumerate(op.inputs)
    ):
        return False
    names = {op.name for op in ops}
    read_outside = {
        tensor
        for tensor in made
        if tensor == body.graph.loss
        or any(user.name not in names for user in body.graph.index.readers[tensor])
    }
    return read_outside <= set(refs(function.result))


def _is_special(op: Op, body: AtHand) -> bool:
    """Whether an op needs care that the function itself does not take."""
    return (
        is_changed(op, body.split)
        or is_random(op)
        or bool(op.writes)
        or body.reads_written(op)
        or not op.grad_enabled
        or op.name in body.split.weighed
    )


def _needs(function: FunctionCall, ops: Sequence[Op], body: AtHand) -> _Needs | None:
    """Return for each argument the tensor to give, its layout, and an op that reads it.

    An argument that no op reads tells a type, a device, or a size: any tensor like it does.
    """
    split, tensors = body.split, body.graph.tensors
    made = {tensor for op in ops for tensor in op.outputs}
    wanted: dict[str, tuple[Layout, Op]] = {}
    for op in ops:
        for i, tensor in enumerate(op.inputs):
            need = split.need(op, i)
            if tensor not in made and wanted.setdefault(tensor, (need, op))[0] != need:
                return None
    values = (function.arguments, tuple(value for _, value in function.keywords))
    given = dict.fromkeys(refs(values))
    if any(tensors[name].origin is not Origin.CONSTANT for name in wanted.keys() - given.keys()):
        return None
    found: _Needs = {}
    for name in given:
        if name in wanted:
            layout, op = wanted[name]
            if name not in body.have and tensors[name].origin not in _KEPT:
                return None
            found[name] = name, layout, op
            continue
        like = _like(name, body, is_measured=_reads_sizes(function, body))
        if like is None:
            return None
        found[name] = like, body.have[like], None
    return found


def _like(name: str, body: AtHand, *, is_measured: bool) -> str | None:
    """Return what is at hand and has the type of a tensor, and its sizes where these count."""
    tensors = body.graph.tensors
    if name not in tensors:
        return None
    for one in (name, *body.have) if name in body.have else body.have:
        is_whole = body.have[one] == WHOLE and tensors[one].shape == tensors[name].shape
        if tensors[one].dtype == tensors[name].dtype and (is_whole or not is_measured):
            return one
    return None


def _argument(value: Value, needs: _Needs, body: AtHand, other: Value) -> Expression:
    def tensor(name: str) -> Expression:
        own, layout, reader = needs[name]
        return Held(own, layout) if reader is None else body.value(own, layout, reader)

    return printed_argument(value, other, body, tensor=tensor)


def _pattern(value: Value, made: set[str], body: AtHand) -> Pattern:
    if isinstance(value, Ref):
        is_new = value.tensor in made and value.tensor in body.graph.tensors
        return Held(value.tensor, body.split.made(value.tensor)) if is_new else None
    if isinstance(value, tuple) and not isinstance(value, Mapped):
        return tuple(_pattern(item, made, body) for item in value)
    return None
