"""Prints the model file's loss as a function of its own, where the split changes it."""

from __future__ import annotations

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import LOSS, ROOT
from autopar.codegen.forward.text.expressions import Held
from autopar.codegen.forward.text.identifiers import string
from autopar.codegen.forward.text.lines import Pattern
from autopar.codegen.forward.text.wrapping import wrapped_definition
from autopar.codegen.forward.writing.writer import Style, written
from autopar.planner.graph import batch_key
from autopar.planner.layouts import WHOLE
from autopar.planner.ops import Ref, Value, refs


def printed_loss(opening: Opening) -> str:
    """Return the source of `split_loss(outputs, batch, tensor)`."""
    builder = BodyBuilder(opening, LOSS, axis="tensor")
    result = opening.split.graph.calls[ROOT].result
    if isinstance(result, Ref):
        builder.bind(Held(result.tensor, opening.arrives(result.tensor, LOSS)), "outputs")
    elif any(refs(result)):
        builder.bind_pattern(_pattern(opening, result), "outputs")
    bind_batch(builder)
    for op in opening.tree.ops[LOSS]:
        if op.call == LOSS:
            builder.add(op)
    graph = opening.split.graph
    body = builder.body(builder.value(graph.loss, WHOLE))
    style = Style(typed=frozenset({"outputs"}), returns="Tensor", axis="tensor", indent=4)
    arguments = ["outputs: Tensor", "batch: Mapping[str, Tensor]", "tensor: Axis"]
    head = wrapped_definition("split_loss", arguments, "Tensor", indent=0)
    doc = '    """Return the loss of outputs that are split over the tensor axis."""'
    return "\n".join([*head, doc, *written(body, builder.owner, style)]) + "\n"


def bind_batch(builder: BodyBuilder) -> None:
    """Have the batch's tensors at hand as `batch["key"]`."""
    for name in builder.graph.inputs:
        builder.bind(Held(name, builder.split.made(name)), f"batch[{string(batch_key(name))}]")


def _pattern(opening: Opening, value: Value) -> Pattern:
    if isinstance(value, Ref):
        return Held(value.tensor, opening.arrives(value.tensor, LOSS))
    if isinstance(value, tuple):
        return tuple(_pattern(opening, item) for item in value)
    return None
