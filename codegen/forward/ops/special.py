"""Ops that are written differently where they are split: the vocabulary, biases, means, sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.codegen.forward.opening import changes
from autopar.codegen.forward.ops.sizes import Wanted, size_along, wanted
from autopar.codegen.forward.ops.table import REDUCTIONS
from autopar.codegen.forward.reading.parts import parts_of
from autopar.codegen.forward.text.expressions import (
    Expression,
    Form,
    Level,
    binary,
    call,
    joined,
    method,
    text,
)
from autopar.codegen.forward.text.literals import literal
from autopar.planner.errors import InputError
from autopar.planner.extent import ONE, Extent
from autopar.planner.layouts import PARTIAL, Kind, Layout
from autopar.planner.ops import Op, Ref, Value, size
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of
from autopar.planner.rules.terms import Dim, Product, leaves, product, size_of

if TYPE_CHECKING:
    from autopar.codegen.forward.body import BodyBuilder


def rewritten(op: Op, body: BodyBuilder) -> Form | None:
    """Return an op as it is written under its split, None where the usual way is right."""
    split = body.split
    rule = rule_of(op.target)
    if rule.kind is OpKind.PARTS and rule.cuts and _are_alike(op, body):
        dim = literal(_number(op.argument("dim")))
        count = literal(len(op.outputs))
        return method(body.inputs(op)[0], "chunk", count, keywords=(("dim", dim),))
    if op.target.startswith("aten.squeeze.") and split.need(op, 0).kind is Kind.SPLIT:
        return _squeezed(op, body)
    if op.target == "aten.histc.default" and _is_whole_numbered(op, body):
        return _histogram(op, body)
    bias = late_bias(op, body)
    if bias is not None:
        body.late_biases[op.outputs[0]] = bias
        operands = [body.value(name, split.need(op, i), op) for i, name in enumerate(op.inputs[:2])]
        return call("F.linear", *operands)
    if changes.is_vocabulary_split(op, split):
        return _embedding(op, body) if rule.kind is OpKind.LOOKUP else _loss(op, body)
    return None


def _squeezed(op: Op, body: BodyBuilder) -> Form:
    """Name the dims of size one: on a rank another may have that size, too."""
    shape = body.graph.tensors[op.inputs[0]].shape
    given = changes.argument(op, "dim")
    asked = given if isinstance(given, tuple) else range(len(shape)) if given is None else (given,)
    places = {_number(dim) % len(shape) for dim in asked}
    dims = [literal(place) for place in sorted(places) if shape[place] == ONE]
    return method(body.inputs(op)[0], "squeeze", dims[0] if len(dims) == 1 else joined(tuple(dims)))


def _is_whole_numbered(op: Op, body: BodyBuilder) -> bool:
    return body.graph.tensors[op.inputs[0]].is_whole_numbered


def _histogram(op: Op, body: BodyBuilder) -> Form:
    """Count whole numbers as floating ones, which every device can."""
    borders = tuple((key, body.plain_size(op.argument(key))) for key in ("bins", "min", "max"))
    counted = call("torch.histc", method(body.inputs(op)[0], "float"), keywords=borders)
    return method(counted, "to", text(f"torch.{body.graph.tensors[op.outputs[0]].dtype}"))


def _are_alike(op: Op, body: BodyBuilder) -> bool:
    """Whether all parts have one size, so that their number says enough on every rank."""
    dim = _number(op.argument("dim"))
    sizes = {wanted(body.split, t, body.split.made(t))[dim].extent for t in op.outputs}
    return len(sizes) == 1 and len(op.outputs) > 1


def _embedding(op: Op, body: BodyBuilder) -> Form:
    weight, indices = body.inputs(op)
    keywords: list[tuple[str, Expression]] = [("parts", _parts(op, 0, body))]
    if op.argument("padding_idx") != -1:
        keywords.append(("padding_idx", literal(_number(op.argument("padding_idx")))))
    return call("vocab_parallel_embedding", indices, weight, body.axis, keywords=tuple(keywords))


def _loss(op: Op, body: BodyBuilder) -> Form:
    logits, target, *_ = body.inputs(op)
    if len(body.graph.tensors[op.inputs[0]].shape) > 2:  # classes stand behind the rows
        logits = method(logits, "movedim", literal(1), literal(-1))
    reduction = op.argument("reduction")
    assert isinstance(reduction, int)
    keywords: list[tuple[str, Expression]] = [("parts", _parts(op, 0, body))]
    keywords.append(("ignore_index", literal(_number(op.argument("ignore_index")))))
    keywords.append(("reduction", literal(REDUCTIONS[reduction])))
    smoothing = op.argument("label_smoothing")
    if isinstance(smoothing, float) and smoothing:
        keywords.append(("label_smoothing", literal(smoothing)))
    return call("vocab_parallel_cross_entropy", logits, target, body.axis, keywords=tuple(keywords))


def _parts(op: Op, position: int, body: BodyBuilder) -> Expression:
    layout = body.split.need(op, position)
    dims = body.split.axes.dims[op.inputs[position]]
    return body.sizes.listed(dims[layout.dim], layout.axis)


def _number(value: Value) -> int:
    assert isinstance(value, int)
    return value


def result_sizes(op: Op, given: tuple[Value, ...], body: BodyBuilder) -> Form:
    """Return the sizes that a view is given: -1 as in the model, the others read from shapes."""
    layout = body.split.made(op.outputs[0])
    sizes = wanted(body.split, op.outputs[0], layout)
    is_view = kind_of(op) is not OpKind.EXPAND
    may_guess = is_view and -1 not in given
    shown: list[Expression] = []
    asked = [None if value == -1 else size for value, size in zip(given, sizes, strict=False)]
    if len(given) != len(sizes):
        asked = [None] * len(given)
    near = body.at_hand(op.inputs[0], body.split.need(op, 0))
    found = body.sizes.of_all(asked, near=near)
    before = body.graph.tensors[op.inputs[0]].shape
    new = len(given) - len(before)  # dims that an expand adds
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


def _computed(size: Wanted, body: BodyBuilder) -> Expression:
    return body.sizes.local(size) if size.axis else body.sizes.whole(size.extent, size.other)


def _numbers(op: Op, body: BodyBuilder) -> tuple[tuple[str, int | float], ...]:
    if op.call not in body.graph.calls:
        return ()
    module = body.split.modules.get(body.graph.calls[op.call].path)
    return module.numbers if module is not None else ()


def _owner(op: Op, body: BodyBuilder) -> str:
    return "self" + body.owner.steps(body.graph.calls[op.call].path)


def local_arguments(op: Op, body: BodyBuilder) -> dict[str, Expression]:
    """Return the arguments of an op that count something of which a rank has only a part."""
    split = body.split
    if changes.has_local_groups(op, split):
        key = "groups" if kind_of(op) is OpKind.CONVOLUTION else "num_groups"
        return {key: _local_groups(op, _number(op.argument(key)), body)}
    layout = split.need(op, 0) if op.inputs else None
    dim = changes.argument(op, "dim")
    if kind_of(op) is OpKind.REPEAT:
        return _local_repeats(op, body)
    if not rule_of(op.target).cuts or layout is None or layout.kind is not Kind.SPLIT:
        return {}
    rank = len(split.graph.tensors[op.inputs[0]].shape)
    if not isinstance(dim, int) or dim % rank != layout.dim:
        return {}
    return _local_cut(op, layout, body)


def _local_groups(op: Op, groups: int, body: BodyBuilder) -> Expression:
    """Return how many groups of channels a rank has, of which it may have more than another."""
    split = body.split
    channels = wanted(split, op.inputs[0], split.need(op, 0))[1]
    parts = parts_of(channels.dim, channels.axis)
    if parts.are_even(split.degree, split.batch):
        ways = Form((*body.axis.parts, ".size"))
        return binary(literal(groups), "//", ways, Level.PRODUCT)
    each = channels.extent.at(0) // groups  # channels of a group
    printed = body.sizes.listed(channels.dim, channels.axis, unit=each)
    return call("local_size", printed, body.axis, is_tensor=False)


def _local_cut(op: Op, layout: Layout, body: BodyBuilder) -> dict[str, Expression]:
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


def _local_repeats(op: Op, body: BodyBuilder) -> dict[str, Expression]:
    """Return how often a dim is repeated on a rank: what is split may be the repetitions."""
    split = body.split
    need, made = body.split.need(op, 0), body.split.made(op.outputs[0])
    if made.kind is not Kind.SPLIT or need.kind is Kind.SPLIT:
        return {}
    given = op.argument("repeats")
    counts = given if isinstance(given, tuple) else (given,)
    place = made.dim if isinstance(given, tuple) else 0
    dim, times = body.split.axes.dims[op.outputs[0]][made.dim], size(counts[place])
    repeated = next((one for one in _ends(dim) if _is_split(one, made.axis, times)), None)
    if repeated is None:
        raise InputError(
            f"{op.name} repeats a dim {counts[place]} times, of which no rank has a part by itself",
            where=op.location,
            fix="write it with expand, or never split this axis (a constraints file's splits)",
        )
    local = body.sizes.local(size_along(split, repeated, made.axis))
    if not isinstance(given, tuple):
        return {"repeats": local}
    shown = [local if i == place else body.plain_size(item) for i, item in enumerate(given)]
    return {"repeats": joined(tuple(shown))}


def _ends(dim: Dim) -> Iterator[Dim]:
    """Yield what a dim may have been repeated by: its outer factors, or its inner ones."""
    factors = dim.factors if isinstance(dim, Product) else (dim,)
    for end in range(1, len(factors) + 1):
        yield product(factors[:end])
        yield product(factors[-end:])


def _is_split(dim: Dim, axis: str, count: Extent) -> bool:
    return size_of(dim) == count and any(leaf.name == axis for leaf in leaves(dim))


def _unflattened(op: Op, body: BodyBuilder) -> Form:
    """Leave the size open of which a rank has a part, whichever the model has left open."""
    given = op.argument("sizes")
    assert isinstance(given, tuple)
    made = body.split.made(op.outputs[0])
    dim = _number(op.argument("dim")) % len(body.graph.tensors[op.inputs[0]].shape)
    local = made.dim - dim if made.kind is Kind.SPLIT else -1
    sizes = body.graph.tensors[op.outputs[0]].shape[dim : dim + len(given)]
    is_whole = 0 <= local < len(given)
    shown = [
        literal(-1 if at == local else size.at(0) if item == -1 and is_whole else _number(item))
        for at, (item, size) in enumerate(zip(given, sizes, strict=True))
    ]
    return joined(tuple(shown))


def _local_bound(op: Op, key: str, layout: Layout, body: BodyBuilder) -> Expression:
    """Return where a slice of a fused dim begins or ends on a rank: the parts are cut evenly."""
    bound = _number(op.argument(key))
    if bound >= 2**62:
        return literal(bound)
    parts = parts_of(body.split.axes.dims[op.inputs[0]][layout.dim], layout.axis)
    if not parts.are_even(body.split.degree, body.split.batch):
        raise InputError(
            f"{op.name} cuts a dim that does not divide by {body.split.degree}",
            where=op.location,
            fix="write it with chunk or split, or choose a degree that divides it",
        )
    whole = body.plain_size(bound, body.split.lengths.argument(op, key))
    return binary(whole, "//", Form((*body.axis.parts, ".size")), Level.PRODUCT)


def late_bias(op: Op, body: BodyBuilder) -> str | None:
    """Return the bias of a row-parallel linear that may be added behind the sum of the partials.

    There it counts once and without a mask. Its gradient is right only where the sum and the bias
    have the same kind of gradient: whole and whole, or partial and partial.
    """
    bias = op.argument("bias") if op.target == "aten.linear.default" else None
    if not isinstance(bias, Ref) or body.split.made(op.outputs[0]).kind is not Kind.PARTIAL:
        return None
    out, held_as = op.outputs[0], body.split.made(bias.tensor).kind
    ways = [
        (body.split.way(user, i)[1:], user)
        for user in body.graph.index.readers[out]
        for i, name in enumerate(user.inputs)
        if name == out
    ]
    needs = [
        (way[0], body.opening.places.get((user.name, out, way[0]))) if way else (PARTIAL, None)
        for way, user in ways
    ]
    left = body.opening.leaves.get(out)
    if left is not None:
        needs = [(left[1], left[0])]
    last = len(body.graph.tensors[out].shape) - 1
    fits = (place == body.scope and _same_gradient(held_as, need, last) for need, place in needs)
    return bias.tensor if needs and all(fits) else None


def _same_gradient(bias: Kind, sum_: Layout, last: int) -> bool:
    match sum_.kind:
        case Kind.WHOLE | Kind.REPLICATED:
            return bias is sum_.kind
        case Kind.SPLIT:
            return bias is Kind.REPLICATED and sum_.dim != last
        case _:
            return False
