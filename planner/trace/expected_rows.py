"""Gives what masks pick the share of its entries that is expected: where masks part the entries.

A loop over experts picks by `chosen == 0`, `chosen == 1`, … the rows of each: any may be all
rows, which no plan can know, but together they are all rows once. Each is priced with its even
share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.rules.table import kind_of


def with_expected_rows(graph: Graph) -> Graph:
    """Return the graph with `Tensor.expected` where masks part what they pick."""
    counted = {tensor.counted_by for tensor in graph.tensors.values()} - {""}
    if not counted:
        return graph
    shares = dict(_shares(graph, counted))
    tensors = {
        name: replace(one, expected=shares.get(one.counted_by, 1.0))
        for name, one in graph.tensors.items()
    }
    return replace(graph, tensors=MappingProxyType(tensors))


def _shares(graph: Graph, counted: set[str]) -> Iterator[tuple[str, float]]:
    """Yield masks of one family, which differ in one number alone, with the share of each."""
    families: dict[object, dict[object, list[str]]] = defaultdict(lambda: defaultdict(list))
    times: dict[str, int] = {}
    for mask in sorted(counted & graph.index.made_by.keys()):
        found = _class_of(mask, graph)
        if found is not None:
            family, number, times[mask] = found
            families[family][number].append(mask)
    for members in families.values():
        if len(members) > 1:
            for mask in (mask for masks in members.values() for mask in masks):
                yield mask, min(1.0, times[mask] / len(members))


def _class_of(mask: str, graph: Graph) -> tuple[object, object, int] | None:
    """Return what a mask compares, the number that it looks for, and how often a row may have it.

    That is `classes == number`, any of several of a row (`(chosen == number).any(-1)`), or the part
    of a one-hot tensor that belongs to a number.
    """
    op = _behind_views(mask, graph)
    times = 1
    if op is not None and op.target == "aten.any.dim":
        before = graph.tensors[op.inputs[0]].shape
        dim = dict(op.arguments).get("dim")
        size = before[dim] if isinstance(dim, int) else None
        times = size.at(1) if size is not None and size.is_constant else 1
        op = _behind_views(op.inputs[0], graph)
    if op is None:
        return None
    given = dict(op.arguments)
    if op.target == "aten.eq.Scalar":
        return ("eq", op.inputs[0]), given.get("other"), times
    if op.target == "aten.select.int":
        one_hot = _behind_views(op.inputs[0], graph)
        if one_hot is not None and one_hot.target.startswith("aten.one_hot."):
            return ("one hot", one_hot.outputs[0], given.get("dim")), given.get("index"), times
    return None


def _behind_views(name: str, graph: Graph) -> Op | None:
    """Return the op that made a tensor, views of it and casts left aside."""
    op = graph.index.made_by.get(name)
    while op is not None and kind_of(op).keeps_entries:
        op = graph.index.made_by.get(op.inputs[0])
    return op
