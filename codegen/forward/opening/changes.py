"""Tells which ops of a graph need other code than the user's under a split, and why."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.forward.reading.split import Split
from autopar.planner.layouts import Kind, Layout
from autopar.planner.ops import Op, Origin, Value
from autopar.planner.rules.random_ops import is_random
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of
from autopar.planner.rules.terms import Dim, Leaf

_VOCABULARY_DIMS = {OpKind.LOOKUP: 0, OpKind.BAG: 0, OpKind.CROSS_ENTROPY: 1}  # of the first input


def argument(op: Op, name: str) -> Value:
    """Return an argument of an op, None where it has none of this name."""
    return next((value for key, value in op.arguments if key == name), None)


def is_split(layout: Layout) -> bool:
    """Whether a layout is a split one."""
    return layout.kind is Kind.SPLIT


def is_split_random(op: Op, split: Split) -> bool:
    """Whether an op draws numbers that must differ from rank to rank."""
    return is_random(op) and any(is_split(split.made(tensor)) for tensor in op.outputs)


def is_changed(op: Op, split: Split) -> bool:
    """Whether the op's own code is another under the split, its conversions aside."""
    layout = split.ops.get(op.name)
    if layout is None:
        return False
    return (
        _has_local_size(op, split)
        or is_vocabulary_split(op, split)
        or has_local_groups(op, split)
        or _converts_own_tensor(op, split)
    )


def is_vocabulary_split(op: Op, split: Split) -> bool:
    """Whether an embedding, a bag of them, or a loss is split along the vocabulary."""
    dim = _VOCABULARY_DIMS.get(kind_of(op))
    return dim is not None and is_split(split.need(op, 0)) and split.need(op, 0).dim == dim


def has_local_groups(op: Op, split: Split) -> bool:
    """Whether the groups of a convolution or norm are split, so that a rank has fewer."""
    channels = split.need(op, 0) if op.inputs else None
    if channels is None or not is_split(channels) or channels.dim != 1:
        return False
    if argument(op, "num_groups") is not None:
        return True
    # Channels may be split inside of every group instead: then a rank has as many groups.
    groups = split.axes.ops[op.name].signature.letters.get("g")
    is_of_groups = isinstance(groups, Leaf) and split.ops[op.name].letter == groups.name
    return kind_of(op) is OpKind.CONVOLUTION and is_of_groups


def is_told_own_rows(op: Op, split: Split) -> bool:
    """Whether an op is told a rank's share of a size that depends on the batch.

    Code that reads it from a tensor of which the rank has the same share needs no change.
    """
    return _told_size(op, split) is not None and is_of_rows(split.made(op.outputs[0]), split)


def splits_rows(split: Split) -> bool:
    """Whether tensor ranks have shares of the rows somewhere: code is then for so many rows."""
    layouts = split.ops.values()
    return any(is_of_rows(one, split) for op in layouts for one in (*op.needs, *op.gives))


def is_of_rows(layout: Layout, split: Split) -> bool:
    """Whether a layout is split along the rows of a batch, whose number is no constant."""
    return is_split(layout) and layout.axis in split.row_axes


def _told_size(op: Op, split: Split) -> Value:
    """Return the size along the split dim that an op is told, None where it is told none."""
    if kind_of(op) is OpKind.REPEAT:
        return _told_repeats(op, split)
    if not (told := rule_of(op.target).sizes):
        return None
    sizes, layout = argument(op, told), split.made(op.outputs[0])
    if not is_split(layout) or not isinstance(sizes, tuple) or sizes[layout.dim] == -1:
        return None
    return sizes[layout.dim]


def _told_repeats(op: Op, split: Split) -> Value:
    made, given = split.made(op.outputs[0]), argument(op, "repeats")
    if not is_split(made) or is_split(split.need(op, 0)):
        return None
    return given[made.dim] if isinstance(given, tuple) else given


def _has_local_size(op: Op, split: Split) -> bool:
    rule = rule_of(op.target)
    if rule.sizes or rule.kind is OpKind.REPEAT:
        return _told_size(op, split) is not None and not is_told_own_rows(op, split)
    if rule.cuts:
        layout, dim = split.need(op, 0), argument(op, "dim")
        rank = len(split.graph.tensors[op.inputs[0]].shape)
        return is_split(layout) and isinstance(dim, int) and dim % rank == layout.dim
    return False


def whole_sizes(op: Op, split: Split) -> Iterator[Dim]:
    """Yield the dims whose sizes an op is told, and of which a rank has all."""
    rule = rule_of(op.target)
    if not rule.sizes and op.inputs and rule.kind is not OpKind.NEW:
        return
    sizes = argument(op, rule.sizes)
    layout = split.made(op.outputs[0])
    for number, dim in enumerate(split.axes.dims[op.outputs[0]]):
        is_told = not isinstance(sizes, tuple) or sizes[number] != -1  # or made anew
        if is_told and not (is_split(layout) and layout.dim == number):
            yield dim


def _converts_own_tensor(op: Op, split: Split) -> bool:
    """Whether a parameter, buffer or constant is converted, which only this code can do."""
    return any(
        split.made(name) != split.need(op, i)
        for i, name in enumerate(op.inputs)
        if split.graph.tensors[name].origin not in (Origin.OP, Origin.INPUT)
    )
