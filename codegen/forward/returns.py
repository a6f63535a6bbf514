"""Prints what a call returns, in the layouts in which it leaves, and the outputs as a whole."""

from __future__ import annotations

from types import NoneType

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.owned import NeedsInlineError
from autopar.codegen.forward.reading.results import held, is_mapping, leaves, pairs
from autopar.codegen.forward.text.expressions import (
    Expression,
    Form,
    Slot,
    call,
    mapped,
    sequence,
    text,
)
from autopar.codegen.forward.text.identifiers import string
from autopar.codegen.forward.text.lines import Line, tuple_of
from autopar.codegen.forward.text.literals import literal
from autopar.planner.layouts import WHOLE
from autopar.planner.ops import Listed, Mapped, NamedFields, Ref, Value


def returned(builder: BodyBuilder, value: Value) -> Expression:
    """Return the result of a call; a tuple stands in a return without brackets."""
    if is_mapping(value):
        record = builder.graph.calls[builder.scope]
        raise NeedsInlineError(builder.scope, record, reason="its result is no plain tuple")
    if isinstance(value, tuple) and not isinstance(value, Listed) and len(value) > 1:
        return tuple_of([_result(builder, item) for item in value])
    return _result(builder, value)


def _result(builder: BodyBuilder, value: Value) -> Expression:
    if isinstance(value, Ref):
        return _tensor(builder, value.tensor)
    if isinstance(value, tuple):
        return sequence(value, tuple(_result(builder, item) for item in value))
    if value is None or isinstance(value, (bool, int, float, complex)):
        return literal(value)
    scope = builder.scope
    raise NeedsInlineError(scope, builder.graph.calls[scope], reason=str(value))


def _tensor(builder: BodyBuilder, tensor: str) -> Expression:
    if tensor not in builder.graph.tensors:
        return literal(None)  # nothing that the loss depends on
    left = builder.opening.leaves.get(tensor)
    layout = builder.have.get(tensor, builder.split.made(tensor))
    need = left[1] if left is not None and left[0] == builder.scope else layout
    return builder.value(tensor, WHOLE if tensor == builder.graph.loss else need)


def show_outputs(builder: BodyBuilder, value: Value) -> tuple[str, ...]:
    """Have an evaluation find the outputs in `for_metrics`; return which parts are not at hand.

    A forward that goes on to the loss returns that alone.
    """
    before = len(builder.lines)
    shown = whole_outputs(builder, value)
    builder.lines.append(Line(results=None, expression=Form(("self.for_metrics = ", Slot(shown)))))
    builder.only_in_evaluations(before)
    return absent_outputs(builder, value)


def absent_outputs(builder: BodyBuilder, value: Value) -> tuple[str, ...]:
    """Return the parts of the outputs that code does not make: `outputs.preds`, say."""
    found = leaves(value, "outputs")
    return tuple(_named(place) for place, part in found if _is_absent(builder, part))


def _named(place: str) -> str:
    return place.replace('"', "'")  # messages stand in strings


def _is_absent(builder: BodyBuilder, part: Value) -> bool:
    """Whether code lacks a part of the outputs: the loss does not need it, or it is an object."""
    if isinstance(part, Ref):
        return part.tensor not in builder.have
    is_object = isinstance(part, str) and part.startswith("<")
    return is_object or not isinstance(part, (str, bool, int, float, complex, NoneType))


def whole_outputs(builder: BodyBuilder, value: Value, place: str = "outputs") -> Expression:
    """Return outputs as the model gives them, whole on each rank; `place` is the code for them."""
    inner = [whole_outputs(builder, one, where) for where, one in held(value, place)]
    if is_mapping(value):
        keys = [key for key, _ in pairs(value)]
        if isinstance(value, NamedFields):
            return call("named_outputs", keywords=tuple(zip(keys, inner, strict=True)))
        made = mapped(zip(map(text, map(string, keys)), inner, strict=True))
        return made if isinstance(value, Mapped) else call("Outputs", made)
    if isinstance(value, tuple):
        return sequence(value, tuple(inner))
    if _is_absent(builder, value):
        return call("Absent", text(string(_named(place))))
    if isinstance(value, Ref):
        return builder.value(value.tensor, WHOLE)
    assert isinstance(value, (str, bool, int, float, complex, NoneType))
    return literal(value)
