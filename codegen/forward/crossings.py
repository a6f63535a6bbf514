"""Prints what a stage gives to the next as a function of the batch, where its lengths vary."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.losses import bind_batch
from autopar.codegen.forward.opened import Crossing
from autopar.codegen.forward.opening.changes import splits_rows
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import LOSS
from autopar.codegen.forward.text.expressions import Expression, call, joined, text
from autopar.codegen.forward.text.identifiers import identifier
from autopar.codegen.forward.text.lines import tuple_of
from autopar.codegen.forward.text.literals import literal
from autopar.codegen.forward.writing.writer import Style, written
from autopar.planner.extent import BATCH
from autopar.planner.layouts import Kind
from autopar.planner.ops import MODEL_DTYPE

CROSSING = "crossing"
_UNPACKED = re.compile(r"\s+((?:\w+, )+\w+) = .*\.shape")


def printed_crossing(opening: Opening, gives: Sequence[Crossing]) -> str:
    """Return the source of `crossing(batch)`, "" where what is given is always as long."""
    split = opening.split
    others = [split.lengths.shape(one.name) for one in gives]
    if all(one.shape == other for one, other in zip(gives, others, strict=True)):
        return ""
    builder = BodyBuilder(opening, LOSS)
    bind_batch(builder)
    shown = [_crossing(one, builder) for one in gives]
    result = tuple_of(shown) if len(shown) > 1 else joined(tuple(shown))
    style = Style(axis="", indent=4)
    doc = '    """Return what a stage gives to the next of a microbatch."""'
    head = f"def {CROSSING}(batch: Mapping[str, Tensor]) -> tuple[Crossing, ...]:"
    lines = map(_of_any_rank, written(builder.body(result), builder.owner, style))
    return "\n".join([head, doc, *lines]) + "\n"


def _of_any_rank(line: str) -> str:
    """Unpack as many sizes as there are names: before there is a batch, a stand-in has more."""
    found = _UNPACKED.fullmatch(line)
    return line if found is None else f"{line}[:{found[1].count(',') + 1}]"


def _crossing(one: Crossing, builder: BodyBuilder) -> Expression:
    split = builder.split
    others = split.lengths.shape(one.name)
    rows = text("MICROBATCH" if splits_rows(split) else "ROWS")
    shape = [
        rows if size == other == BATCH else builder.sizes.whole(size, other)
        for size, other in zip(one.shape, others, strict=True)
    ]
    given: list[Expression] = [joined(tuple(shape))]
    layout = one.layout
    if layout.kind is Kind.SPLIT:
        dim = split.axes.dims[one.name][layout.dim]
        parts = builder.sizes.listed(dim, layout.axis)
        given.append(call("Split", literal(layout.dim), parts))
    keywords: list[tuple[str, Expression]] = []
    if one.dtype != MODEL_DTYPE:
        keywords.append(("dtype", text(f"torch.{identifier(one.dtype)}")))
    if not one.has_gradient:
        keywords.append(("has_gradient", literal(value=False)))
    return call("Crossing", *given, keywords=tuple(keywords))
