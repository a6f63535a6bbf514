"""Tells whether a module's own code would take the size of a part for that of a whole, or reversed.

A trace shows sizes as numbers, those of rows as multiples of the batch, and not where they were
read. What a rank has at hand in a module tells what they may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from autopar.codegen.forward.opening.changes import (
    is_of_rows,
    is_split,
    is_told_own_rows,
    whole_sizes,
)
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import LOSS
from autopar.codegen.forward.reading.modules import Module
from autopar.codegen.forward.reading.split import Split
from autopar.planner.extent import Extent
from autopar.planner.findings.row_numbers import counts_rows, numbers
from autopar.planner.layouts import Layout
from autopar.planner.ops import MODULE, Op, Value, objects
from autopar.planner.rules.terms import leaves


def mistakes_sizes(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether a call may take a size for another if it runs as it is; `ops` are its own."""
    if _takes_sizes_of_parts(call, ops, opening):
        return True
    is_told = any(is_told_own_rows(op, opening.split) for op in ops)
    return is_told and not _has_own_rows_alone(call, opening)


def _takes_sizes_of_parts(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether the code of a call may read a size from what a rank has a part of.

    It shapes a whole dim where a part of the same axis is at hand (`_, h, w = x.shape`, of an x
    that is split by rows), or computes with a number that may be such a size (`x.shape[1]`).
    """
    split, tree = opening.split, opening.tree
    made = {name for op in ops for name in op.outputs}
    made.update(*map(tree.leaving, tree.inside[call]))
    layouts = [opening.arrives(name, call) for name in made]
    layouts += [opening.entry(call, name) for name in tree.entering(call)]
    layouts += [split.need(op, i) for op in ops for i in range(len(op.inputs))]
    parts = {layout.axis for layout in layouts if is_split(layout)}
    if not parts:
        return False
    return _computes_with_sizes(call, ops, parts, opening) or _shapes_parts(ops, parts, split)


def may_read_parts(ops: Sequence[Op], split: Split) -> bool:
    """Whether code that runs some ops may read a size from what a rank has a part of."""
    layouts = [split.need(op, i) for op in ops for i in range(len(op.inputs))]
    layouts += [split.made(name) for op in ops for name in op.outputs]
    parts = {layout.axis for layout in layouts if is_split(layout)}
    if not parts:
        return False
    has_numbers = any(counts_rows(op) or is_told_own_rows(op, split) for op in ops)
    has_constants = not parts <= split.row_axes and any([*numbers(op)] for op in ops)
    return has_numbers or has_constants or _shapes_parts(ops, parts, split)


def _shapes_parts(ops: Sequence[Op], parts: AbstractSet[str], split: Split) -> bool:
    """Whether an op is told the size of a whole dim of an axis of which a part is at hand."""
    return any(
        not parts.isdisjoint(leaf.name for leaf in leaves(dim))
        for op in ops
        for dim in whole_sizes(op, split)
    )


def _computes_with_sizes(
    call: str, ops: Sequence[Op], parts: AbstractSet[str], opening: Opening
) -> bool:
    """Whether a number in a call may be the size of a part: which ones are is not traced."""
    if any(map(counts_rows, ops)):
        return True
    module = _module(call, opening)
    may_read = module is None or module.reads_sizes
    has_constant = not parts <= opening.split.row_axes
    return may_read and has_constant and any([*numbers(op)] for op in ops)


def _has_own_rows_alone(call: str, opening: Opening) -> bool:
    """Whether a call's code can read numbers of rows from the rank's share alone."""
    tree, module = opening.tree, _module(call, opening)
    if module is None or module.keeps_state:
        return False
    record = tree.graph.calls[call]
    if any(_untold((record.arguments, tuple(value for _, value in record.keywords)))):
        return False
    made = (name for op in tree.ops[call] for name in op.outputs)
    layouts = {name: opening.arrives(name, call) for name in made}
    layouts |= {name: opening.entry(call, name) for name in tree.entering(call)}
    return all(_is_share(name, layout, opening) for name, layout in layouts.items())


def _module(call: str, opening: Opening) -> Module | None:
    """Return the module of a call, None for the loss and for what is none."""
    record = None if call == LOSS else opening.tree.graph.calls[call]
    return opening.split.modules.get(record.path) if record is not None else None


def _untold(given: Value) -> Iterator[Value]:
    """Yield what arguments have that may know a number of rows: numbers of them, objects."""
    if isinstance(given, Extent) and not given.is_constant:
        yield given
    elif isinstance(given, tuple):
        for item in given:
            yield from _untold(item)
    elif isinstance(given, str):
        yield from (name for name in objects(given) if not name.startswith(MODULE))


def _is_share(tensor: str, layout: Layout, opening: Opening) -> bool:
    """Whether a tensor's size that depends on the batch, if any, is the rank's share of it."""
    own = opening.tree.graph.tensors.get(tensor)
    shape = own.shape if own is not None else ()
    varying = [number for number, size in enumerate(shape) if not size.is_constant]
    return not varying or (is_of_rows(layout, opening.split) and varying == [layout.dim])
