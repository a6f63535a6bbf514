"""Finds the inputs of which a tensor rank uses its own rows alone: it need not read the others'."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from autopar.codegen.forward.opening.changes import is_of_rows
from autopar.codegen.forward.reading.split import Split
from autopar.planner.extent import BATCH
from autopar.planner.layouts import WHOLE, Layout


def with_own_rows(split: Split) -> Split:
    """Return a split whose ranks are given their shares of inputs where that is all they use."""
    if split.batch < split.degree:  # some would have none
        return split
    own = {name: layout for name in split.graph.inputs if (layout := _share(name, split))}
    return replace(split, own_rows=tuple(own), gives=MappingProxyType({**split.gives, **own}))


def _share(name: str, split: Split) -> Layout | None:
    """Return the layout in which all want an input, if that is a share of its rows."""
    shape = split.graph.tensors[name].shape
    if not shape or shape[0] != BATCH:
        return None
    wanted = {
        split.need(op, position)
        for op in split.graph.ops
        for position, tensor in enumerate(op.inputs)
        if tensor == name
    }
    layout = wanted.pop() if len(wanted) == 1 else WHOLE
    return layout if layout.dim == 0 and is_of_rows(layout, split) else None
