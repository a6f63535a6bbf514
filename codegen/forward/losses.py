"""Prints what scripts make of outputs that are split: the loss, and the metrics, as functions."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import LOSS, ROOT
from autopar.codegen.forward.reading.results import held, is_plain
from autopar.codegen.forward.returns import absent_outputs, whole_outputs
from autopar.codegen.forward.text.expressions import Held, call, text
from autopar.codegen.forward.text.identifiers import string
from autopar.codegen.forward.text.lines import Body, Pattern
from autopar.codegen.forward.text.wrapping import wrapped_definition
from autopar.codegen.forward.writing.writer import Style, written
from autopar.planner.graph import batch_key
from autopar.planner.layouts import WHOLE, Kind
from autopar.planner.ops import Ref, Value, refs

_ARGUMENTS = ("outputs: Tensor", "batch: Mapping[str, Tensor]", "tensor: Axis")


def printed_loss(opening: Opening) -> str:
    """Return the source of `split_loss(outputs, batch, tensor)`."""
    builder = _given_outputs(opening)
    bind_batch(builder)
    for op in opening.tree.ops[LOSS]:
        if op.call == LOSS:
            builder.add(op)
    body = builder.body(builder.value(opening.split.graph.loss, WHOLE))
    return _function("split_loss", builder, body, returns="Tensor", what="loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedMetrics:
    """The source of `whole_metrics(outputs, batch, tensor)`, and the outputs that it lacks."""

    source: str
    absent: tuple[str, ...]


def printed_metrics(opening: Opening) -> PrintedMetrics | None:
    """Return what measures the outputs of a forward; None if each rank has all of them whole."""
    builder = _given_outputs(opening)
    result = opening.split.graph.calls[ROOT].result
    absent = absent_outputs(builder, result) if ROOT in opening.opened else ()
    is_whole = all(one.kind in (Kind.WHOLE, Kind.REPLICATED) for one in builder.have.values())
    if is_whole and not absent:
        return None
    outputs = whole_outputs(builder, result)
    body = builder.body(call("new_metrics", outputs, text("batch")))
    returns = "Mapping[str, Tensor]"
    source = _function("whole_metrics", builder, body, returns=returns, what="metrics")
    return PrintedMetrics(source=source, absent=absent)


def _given_outputs(opening: Opening) -> BodyBuilder:
    """Return what builds a function that is given what the model returns."""
    builder = BodyBuilder(opening, LOSS, axis="tensor")
    result = opening.split.graph.calls[ROOT].result
    _bind_outputs(builder, result, "outputs")
    return builder


def _bind_outputs(builder: BodyBuilder, value: Value, place: str) -> None:
    """Have at hand the tensors of the outputs, which code reaches at a place."""
    if isinstance(value, Ref):
        if value.tensor in builder.graph.tensors:
            builder.bind(Held(value.tensor, builder.opening.arrives(value.tensor, LOSS)), place)
    elif is_plain(value) and any(refs(value)):
        builder.bind_pattern(_pattern(builder.opening, value), place)
    else:
        for inner, one in held(value, place):
            _bind_outputs(builder, one, inner)


def _function(name: str, builder: BodyBuilder, body: Body, *, returns: str, what: str) -> str:
    style = Style(axis="tensor", indent=4)
    head = wrapped_definition(name, [*_ARGUMENTS], returns, indent=0)
    doc = f'    """Return the {what} of outputs that are split over the tensor axis."""'
    return "\n".join([*head, doc, *written(body, builder.owner, style)]) + "\n"


def bind_batch(builder: BodyBuilder) -> None:
    """Have the batch's tensors at hand as `batch["key"]`."""
    for name in builder.graph.inputs:
        builder.bind(Held(name, builder.split.made(name)), f"batch[{string(batch_key(name))}]")


def _pattern(opening: Opening, value: Value) -> Pattern:
    if isinstance(value, Ref) and value.tensor in opening.split.graph.tensors:
        return Held(value.tensor, opening.arrives(value.tensor, LOSS))
    if isinstance(value, tuple) and any(refs(value)):
        return tuple(_pattern(opening, item) for item in value)
    return None
