"""Prints what a call returns, in the layouts in which it leaves, and the outputs as a whole."""

from __future__ import annotations

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.owned import NeedsInlineError
from autopar.codegen.forward.reading.results import is_mapping, pairs
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
from autopar.planner.ops import Listed, Mapped, Ref, Value, refs


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


def shows_outputs(builder: BodyBuilder, value: Value) -> bool:
    """Have an evaluation find the outputs in `for_metrics`; False where not all are at hand.

    A forward that goes on to the loss returns that alone.
    """
    names = list(refs(value))
    if not names or any(name not in builder.have for name in names):
        return False
    before = len(builder.lines)
    shown = whole_outputs(builder, value)
    builder.lines.append(
        Line(results=None, expression=Form(("self.for_metrics = ", Slot(shown)), is_tensor=False))
    )
    builder.only_in_evaluations(before)
    return True


def whole_outputs(builder: BodyBuilder, value: Value) -> Expression:
    """Return outputs as the model gives them, whole on each rank; None for objects in them."""
    if isinstance(value, Ref):
        is_here = value.tensor in builder.have  # else nothing that the loss depends on
        return builder.value(value.tensor, WHOLE) if is_here else literal(None)
    if is_mapping(value):
        assert isinstance(value, tuple)
        items = [(text(string(k)), whole_outputs(builder, v)) for k, v in pairs(value)]
        made = mapped(items)
        return made if isinstance(value, Mapped) else call("Outputs", made)
    if isinstance(value, tuple):
        return sequence(value, tuple(whole_outputs(builder, item) for item in value))
    if isinstance(value, (bool, int, float, complex)):
        return literal(value)
    return literal(None)
