"""Prints the conversions of layouts, and tells in a comment why each stands where it does."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.codegen.forward.ops.sizes import Sizes
from autopar.codegen.forward.reading.split import Split
from autopar.codegen.forward.text.expressions import Expression, Form, Held, call, text
from autopar.planner.errors import InputError
from autopar.planner.layouts import CONVERSIONS, Kind, Layout
from autopar.planner.ops import Op


def convert(value: Expression, wanted: Held, held: Held, sizes: Sizes) -> Form:
    """Return a value converted from its layout to the wanted one."""
    produced, needed = held.layout, wanted.layout
    conversion = CONVERSIONS.get((produced.kind, needed.kind))
    if conversion is None:
        raise InputError(
            f"{held.tensor} is made in layout {produced} and needed in {needed}",
            expected="a pair of layouts with a conversion between them",
            fix="plan again: this plan is not sound",
        )
    if produced.kind is Kind.SPLIT and needed.kind is Kind.SPLIT:
        return _exchange(value, wanted, held, sizes, conversion.function)
    layout = produced if produced.kind is Kind.SPLIT else needed
    if layout.kind is not Kind.SPLIT:
        return call(conversion.function, value, sizes.axis)
    dim = text(str(layout.dim))
    cut = sizes.split.axes.dims[held.tensor][layout.dim], layout.axis
    if sizes.may_omit_parts(*cut, is_whole=needed.kind is Kind.SPLIT):
        return call(conversion.function, value, dim, sizes.axis)
    keywords = (("parts", sizes.listed(*cut)),)
    return call(conversion.function, value, dim, sizes.axis, keywords=keywords)


def convert_own(own: Expression, tensor: str, need: Layout, sizes: Sizes) -> Expression:
    """Return a parameter or buffer in the layout in which it is needed."""
    made = sizes.split.made(tensor)
    if made == need:
        return own
    known = sizes.split.graph.tensors[tensor]
    if not known.requires_grad and {made.kind, need.kind} == {Kind.WHOLE, Kind.REPLICATED}:
        return own
    return convert(own, Held(tensor, need), Held(tensor, made), sizes)


def _exchange(value: Expression, wanted: Held, held: Held, sizes: Sizes, name: str) -> Form:
    gathered, cut = held.layout, wanted.layout
    keywords: list[tuple[str, Expression]] = []
    for key, layout in (("gather_parts", gathered), ("split_parts", cut)):
        parts = sizes.split.axes.dims[held.tensor][layout.dim], layout.axis
        if not sizes.may_omit_parts(*parts, is_whole=key == "split_parts"):
            keywords.append((key, sizes.listed(*parts)))
    dims = text(str(gathered.dim)), text(str(cut.dim))
    return call(name, value, *dims, sizes.axis, keywords=tuple(keywords))


def _used_along(users: Sequence[Op], split: Split) -> str:
    """Return what the first split op is split along that reads a value, or what is made of it."""
    waiting, seen = list(users), set[str]()
    while waiting:
        op = waiting.pop(0)
        if name := split.split_axis_name(op):
            return name
        layout = split.ops.get(op.name)
        gives = layout.gives if layout is not None and op.name not in seen else ()
        seen.add(op.name)
        if any(one.kind is Kind.REPLICATED for one in gives):
            waiting += [user for made in op.outputs for user in split.graph.index.readers[made]]
    return ""


def reason(held: Held, wanted: Held, users: Sequence[Op], split: Split) -> str:
    """Return why a value is converted, in the names of the model's axes."""
    maker = split.graph.index.made_by.get(held.tensor)
    made_along = split.split_axis_name(maker) if maker is not None else ""
    used_along = _used_along(users, split)
    source, target = split.axis_name(held.layout), split.axis_name(wanted.layout)
    sums = f"partial sums over {made_along}" if made_along else "partial sums"
    use = f"split along {used_along} from here on" if used_along else "whole from here on"
    match held.layout.kind, wanted.layout.kind:
        case Kind.PARTIAL, Kind.SPLIT:
            return f"{sums}, added up into shards of {target}"
        case Kind.PARTIAL, _:
            return f"{sums}, added up"
        case Kind.SPLIT, Kind.SPLIT if source == target:
            dims = held.layout.dim, wanted.layout.dim
            return f"from shards of {source} along dim {dims[0]} to those along dim {dims[1]}"
        case Kind.SPLIT, Kind.SPLIT:
            return f"from shards of {source} to shards of {target}"
        case Kind.SPLIT, Kind.PARTIAL:
            return f"each rank adds its own shard of {source}"
        case Kind.SPLIT, _:
            return f"shards of {source} gathered: {use}"
        case _, Kind.SPLIT:
            return f"each rank takes its shard of {target}"
        case Kind.WHOLE, Kind.REPLICATED:
            return f"{use}: gradients are partial sums"
        case _, Kind.PARTIAL:
            return "counted once among the partial sums"
        case _:
            return "one rank's gradient is enough: the others have the same"
