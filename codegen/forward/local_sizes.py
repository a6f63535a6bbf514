"""Prints an op's arguments that are sizes or counts: on a rank they may be smaller."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.forward.ops.arguments import whole_number
from autopar.codegen.forward.ops.sizes import SizeToPrint, size_along, wanted
from autopar.codegen.forward.scope import AvailableValues
from autopar.codegen.text.expressions import (
    Expression,
    LocalTensor,
    SourceForm,
    call,
    joined,
    literal,
    text,
)
from autopar.planner.errors import InputError
from autopar.planner.graph.layouts import Layout, LayoutKind
from autopar.planner.graph.ops import ONE, Extent, Op, Value, size
from autopar.planner.programs.layouts.opened import argument, has_local_groups
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.signature import Dim, FlattenedDims, leaves, product, size_of
from autopar.planner.rules.table import kind_of, rule_of


def result_sizes(op: Op, given: tuple[Value, ...], body: AvailableValues) -> SourceForm:
    """Return the sizes of a view or expand: -1 as in the model, others from shapes if possible."""
    layout = body.split.made(op.outputs[0])
    sizes = wanted(body.split, op.outputs[0], layout)
    is_view = kind_of(op) is not OpKind.EXPAND
    may_guess = is_view and -1 not in given
    shown: list[Expression] = []
    asked = [None if value == -1 else size for value, size in zip(given, sizes, strict=False)]
    if len(given) != len(sizes):
        asked = [None] * len(given)
    viewed = body.value(op.inputs[0], body.split.need(op, 0))
    found = body.sizes.of_all(asked, near=viewed if isinstance(viewed, LocalTensor) else None)
    before = body.graph.tensors[op.inputs[0]].shape
    new = len(given) - len(before)  # dims that expand adds
    for position, (value, own, fact) in enumerate(zip(given, sizes, found, strict=False)):
        if value == -1 or own.extent == ONE:
            shown.append(literal(-1 if value == -1 else 1))
            continue
        name = body.sizes.named(own, _numbers(op, body))
        if name is not None:
            shown.append(text(f"{_owner(op, body)}.{name}"))
        elif fact is not None:
            shown.append(fact)
        elif not own.axis and not own.varies:
            shown.append(literal(own.extent.at(0)))
        elif may_guess:
            may_guess = False
            shown.append(literal(-1))
        elif not is_view and position >= new and before[position - new] == own.extent:
            shown.append(literal(-1))
        else:
            shown.append(_computed(own, body))
    return joined(tuple(shown))


def _computed(size: SizeToPrint, body: AvailableValues) -> Expression:
    return body.sizes.local(size) if size.axis else body.sizes.whole(size.extent, size.other)


def _numbers(op: Op, body: AvailableValues) -> tuple[tuple[str, int | float], ...]:
    if op.call not in body.graph.calls:
        return ()
    module = body.split.modules.get(body.graph.calls[op.call].path)
    return module.numbers if module is not None else ()


def _owner(op: Op, body: AvailableValues) -> str:
    return "self" + body.owner.steps(body.graph.calls[op.call].path)


def local_arguments(op: Op, body: AvailableValues) -> dict[str, Expression]:
    """Return the arguments that are smaller on a rank: groups, repeats, ends of slices, sizes."""
    split = body.split
    own = split.ops.get(op.name)
    if own is not None and has_local_groups(op, own, split.axes):
        key = "groups" if kind_of(op) is OpKind.CONVOLUTION else "num_groups"
        return {key: _local_groups(op, whole_number(op.argument(key)), body)}
    layout = split.need(op, 0) if op.inputs else None
    dim = argument(op, "dim")
    if kind_of(op) is OpKind.REPEAT:
        return _local_repeats(op, body)
    if not rule_of(op.target).cuts or layout is None or layout.kind is not LayoutKind.SPLIT:
        return {}
    rank = len(split.graph.tensors[op.inputs[0]].shape)
    if not isinstance(dim, int) or dim % rank != layout.dim:
        return {}
    return _local_cut(op, layout, body)


def _local_groups(op: Op, groups: int, body: AvailableValues) -> Expression:
    """Return a rank's number of groups of channels; ranks may have different numbers."""
    split = body.split
    channels = wanted(split, op.inputs[0], split.need(op, 0))[1]
    if body.sizes.is_shared_evenly(channels.dim, channels.axis):
        return body.sizes.per_rank(literal(groups))
    each = channels.extent.at(0) // groups  # channels per group
    printed = body.sizes.listed(channels.dim, channels.axis, unit=each)
    return call("local_size", printed, body.axis)


def _local_cut(op: Op, layout: Layout, body: AvailableValues) -> dict[str, Expression]:
    split, rule = body.split, rule_of(op.target)

    def size_of_output(tensor: str) -> Expression:
        size = wanted(split, tensor, split.made(tensor))[layout.dim]
        return _computed(size, body)

    if rule.kind is OpKind.PART:
        return {
            key: _local_bound(op, key, layout, body)
            for key in rule.cuts
            if isinstance(op.argument(key), int) and op.argument(key) != 0
        }
    (key,) = rule.cuts
    if rule.kind is not OpKind.PARTS:
        return {key: _unflattened(op, body)}
    sizes = tuple(map(size_of_output, op.outputs))
    return {key: joined(sizes) if isinstance(op.argument(key), tuple) else sizes[0]}


def _local_repeats(op: Op, body: AvailableValues) -> dict[str, Expression]:
    """Return the argument `repeats` on a rank, if the repetitions are split."""
    split = body.split
    need, made = body.split.need(op, 0), body.split.made(op.outputs[0])
    if made.kind is not LayoutKind.SPLIT or need.kind is LayoutKind.SPLIT:
        return {}
    given = op.argument("repeats")
    counts = given if isinstance(given, tuple) else (given,)
    place = made.dim if isinstance(given, tuple) else 0
    dim, times = body.split.axes.dims[op.outputs[0]][made.dim], size(counts[place])
    repeated = next((one for one in _ends(dim) if _is_split(one, made.axis, times)), None)
    if repeated is None:
        raise InputError(
            f"{op.name} repeats a dim {counts[place]} times, and its split is not between repeats",
            where=op.location,
            fix="write it with expand, or never split this axis (a constraints file's splits)",
        )
    local = body.sizes.local(size_along(split, repeated, made.axis))
    if not isinstance(given, tuple):
        return {"repeats": local}
    shown = [local if i == place else body.plain_size(item) for i, item in enumerate(given)]
    return {"repeats": joined(tuple(shown))}


def _ends(dim: Dim) -> Iterator[Dim]:
    """Yield the product of a dim's first n factors, and that of its last n, for each n."""
    factors = dim.factors if isinstance(dim, FlattenedDims) else (dim,)
    for end in range(1, len(factors) + 1):
        yield product(factors[:end])
        yield product(factors[-end:])


def _is_split(dim: Dim, axis: str, count: Extent) -> bool:
    return size_of(dim) == count and any(leaf.name == axis for leaf in leaves(dim))


def _unflattened(op: Op, body: AvailableValues) -> SourceForm:
    """Print the sizes of an unflatten: -1 for the split one, even if the model has -1 elsewhere."""
    given = op.argument("sizes")
    assert isinstance(given, tuple)
    made = body.split.made(op.outputs[0])
    dim = whole_number(op.argument("dim")) % len(body.graph.tensors[op.inputs[0]].shape)
    local = made.dim - dim if made.kind is LayoutKind.SPLIT else -1
    cut = slice(dim, dim + len(given))
    sizes = body.graph.tensors[op.outputs[0]].shape[cut]
    others = body.split.lengths.shape(op.outputs[0])[cut]
    is_split_here = 0 <= local < len(given)  # one of the new dims is split
    shown = [
        literal(-1)
        if at == local or (item == -1 and not is_split_here)
        else body.plain_size(own, other)
        for at, (item, own, other) in enumerate(zip(given, sizes, others, strict=True))
    ]
    return joined(tuple(shown))


def _local_bound(op: Op, key: str, layout: Layout, body: AvailableValues) -> Expression:
    """Return a rank's start or end of a slice in a split dim; ranks must divide it evenly."""
    bound = whole_number(op.argument(key))
    if bound >= 2**62:
        return literal(bound)
    dim = body.split.axes.dims[op.inputs[0]][layout.dim]
    if not body.sizes.is_shared_evenly(dim, layout.axis):
        raise InputError(
            f"{op.name} cuts a dim that {body.split.degree} ranks do not divide evenly",
            where=op.location,
            fix="write it with chunk or split, or choose a degree that divides it",
        )
    return body.sizes.per_rank(body.plain_size(bound, body.split.lengths.argument(op, key)))
