"""Prints ops that are written differently where they are split: lookups, losses, linears, parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.codegen.forward.at_hand import AtHand
from autopar.codegen.forward.opening import changes
from autopar.codegen.forward.ops.arguments import whole_number
from autopar.codegen.forward.ops.sizes import wanted
from autopar.codegen.forward.ops.table import BAG_MODES, REDUCTIONS
from autopar.codegen.forward.text.expressions import (
    Expression,
    Form,
    call,
    joined,
    method,
    text,
)
from autopar.codegen.forward.text.literals import literal
from autopar.planner.extent import ONE
from autopar.planner.layouts import PARTIAL, Kind, Layout
from autopar.planner.ops import Op, Ref
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import rule_of


def rewritten(op: Op, body: AtHand) -> Form | None:
    """Return an op as it is written under its split, None where the usual way is right."""
    split = body.split
    rule = rule_of(op.target)
    if rule.kind is OpKind.PARTS and rule.cuts and _are_alike(op, body):
        dim = literal(whole_number(op.argument("dim")))
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
        return _SPLIT_VOCABULARY[rule.kind](op, body)
    return None


def _squeezed(op: Op, body: AtHand) -> Form:
    """Name the dims of size one: on a rank another may have that size, too."""
    shape = body.graph.tensors[op.inputs[0]].shape
    given = changes.argument(op, "dim")
    asked = given if isinstance(given, tuple) else range(len(shape)) if given is None else (given,)
    places = {whole_number(dim) % len(shape) for dim in asked}
    dims = [literal(place) for place in sorted(places) if shape[place] == ONE]
    return method(body.inputs(op)[0], "squeeze", dims[0] if len(dims) == 1 else joined(tuple(dims)))


def _is_whole_numbered(op: Op, body: AtHand) -> bool:
    return body.graph.tensors[op.inputs[0]].is_whole_numbered


def _histogram(op: Op, body: AtHand) -> Form:
    """Count whole numbers as floating ones, which every device can."""
    borders = tuple((key, body.plain_size(op.argument(key))) for key in ("bins", "min", "max"))
    counted = call("torch.histc", method(body.inputs(op)[0], "float"), keywords=borders)
    return method(counted, "to", text(f"torch.{body.graph.tensors[op.outputs[0]].dtype}"))


def _are_alike(op: Op, body: AtHand) -> bool:
    """Whether all parts have one size, so that their number says enough on every rank."""
    dim = whole_number(op.argument("dim"))
    sizes = {wanted(body.split, t, body.split.made(t))[dim].extent for t in op.outputs}
    return len(sizes) == 1 and len(op.outputs) > 1


def _embedding(op: Op, body: AtHand) -> Form:
    weight, indices = body.inputs(op)
    keywords: list[tuple[str, Expression]] = [("parts", _parts(op, 0, body))]
    if op.argument("padding_idx") != -1:
        keywords.append(("padding_idx", literal(whole_number(op.argument("padding_idx")))))
    return call("vocab_parallel_embedding", indices, weight, body.axis, keywords=tuple(keywords))


def _bag(op: Op, body: AtHand) -> Form:
    given = dict(zip(op.inputs, body.inputs(op), strict=True))
    mode, offsets = op.argument("mode"), op.argument("offsets")
    weight, indices = op.argument("weight"), op.argument("indices")
    assert isinstance(mode, int)
    assert isinstance(weight, Ref)
    assert isinstance(indices, Ref)
    assert isinstance(offsets, Ref)
    keywords: list[tuple[str, Expression]] = [
        ("parts", _parts(op, 0, body)),
        ("mode", literal(BAG_MODES[mode])),
    ]
    weights = op.argument("per_sample_weights")
    if isinstance(weights, Ref):
        keywords.append(("per_sample_weights", given[weights.tensor]))
    if op.argument("include_last_offset"):
        keywords.append(("include_last_offset", literal(value=True)))
    if op.argument("padding_idx") is not None:
        keywords.append(("padding_idx", literal(whole_number(op.argument("padding_idx")))))
    return call(
        "vocab_parallel_embedding_bag",
        given[indices.tensor],
        given[weight.tensor],
        given[offsets.tensor],
        body.axis,
        keywords=tuple(keywords),
    )


def _loss(op: Op, body: AtHand) -> Form:
    logits, target, *_ = body.inputs(op)
    if len(body.graph.tensors[op.inputs[0]].shape) > 2:  # classes stand behind the rows
        logits = method(logits, "movedim", literal(1), literal(-1))
    reduction = op.argument("reduction")
    assert isinstance(reduction, int)
    keywords: list[tuple[str, Expression]] = [("parts", _parts(op, 0, body))]
    keywords.append(("ignore_index", literal(whole_number(op.argument("ignore_index")))))
    keywords.append(("reduction", literal(REDUCTIONS[reduction])))
    smoothing = op.argument("label_smoothing")
    if isinstance(smoothing, float) and smoothing:
        keywords.append(("label_smoothing", literal(smoothing)))
    return call("vocab_parallel_cross_entropy", logits, target, body.axis, keywords=tuple(keywords))


_SPLIT_VOCABULARY: Mapping[OpKind, Callable[[Op, AtHand], Form]] = MappingProxyType(
    {OpKind.LOOKUP: _embedding, OpKind.BAG: _bag, OpKind.CROSS_ENTROPY: _loss}
)


def _parts(op: Op, position: int, body: AtHand) -> Expression:
    layout = body.split.need(op, position)
    dims = body.split.axes.dims[op.inputs[position]]
    return body.sizes.listed(dims[layout.dim], layout.axis)


def late_bias(op: Op, body: AtHand) -> str | None:
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
