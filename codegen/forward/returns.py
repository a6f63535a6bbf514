"""Prints what a call returns, in the layouts in which it leaves."""

from __future__ import annotations

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.owned import NeedsInlineError
from autopar.codegen.forward.reading.results import is_mapping
from autopar.codegen.forward.text.expressions import Expression, sequence
from autopar.codegen.forward.text.lines import tuple_of
from autopar.codegen.forward.text.literals import literal
from autopar.planner.layouts import WHOLE
from autopar.planner.ops import Listed, Ref, Value


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
