"""Finds the slices of one tensor that tile a dim, and so cut it into a concatenation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.planner.extent import Extent
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Ref, refs

Tiles = tuple[tuple[Extent, ...], int]


def tiles_of(graph: Graph) -> Mapping[str, Tiles]:
    """Return, for each slice whose fellows tile the dim, all the tiles and its own position."""
    cuts: dict[tuple[str, int], dict[str, tuple[int, int]]] = defaultdict(dict)
    source: dict[str, str] = {}  # x[:] → x
    for op in graph.ops:
        cut = _cut(op, graph)
        if cut is not None:
            dim, start, end = cut
            first = op.inputs[0]
            cuts[source.get(first, first), dim][op.name] = (start, end)
        if op.target == "aten.slice.Tensor":
            taken, out = op.inputs[0], op.outputs[0]
            if graph.tensors[taken].shape == graph.tensors[out].shape:
                source[out] = source.get(taken, taken)
    found: dict[str, Tiles] = {}
    for (tensor, dim), pieces in cuts.items():
        ends = graph.tensors[tensor].shape[dim].at(0)
        borders = sorted(set(pieces.values()))
        meets = [start for start, _ in borders] == [0, *(end for _, end in borders[:-1])]
        if meets and borders[-1][1] == ends and len(borders) > 1:
            sizes = tuple(Extent.of(end - start) for start, end in borders)
            for name, piece in pieces.items():
                found[name] = (sizes, borders.index(piece))
    return found


def _cut(op: Op, graph: Graph) -> tuple[int, int, int] | None:
    """Return dim, start and end of a slice with step one, or of an index of one constant."""
    if op.target == "aten.slice.Tensor":
        shape = graph.tensors[op.inputs[0]].shape
        dim, step = op.argument("dim"), op.argument("step")
        start, end = op.argument("start"), op.argument("end")
        if not isinstance(dim, int) or step != 1 or not shape[dim].is_constant:
            return None
        size = shape[dim].at(0)
        if not isinstance(start, int | None) or not isinstance(end, int | None):
            return None
        first, last, _ = slice(start, end).indices(size)
        return (dim % len(shape), first, last) if last > first else None
    if op.target == "aten.index.Tensor":
        return _constant_index(op, graph)
    return None


def _constant_index(op: Op, graph: Graph) -> tuple[int, int, int] | None:
    indices = op.argument("indices")
    assert isinstance(indices, tuple)
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if len(given) != 1 or not isinstance(given[0][1], Ref):
        return None
    dim, name = given[0][0], next(refs(given[0][1]))
    values = graph.constants[name].values if name in graph.constants else None
    size = graph.tensors[op.inputs[0]].shape[dim]
    if not isinstance(values, tuple) or len(values) != 1 or not size.is_constant:
        return None
    if not isinstance(values[0], int):
        return None
    position = values[0] % size.at(0)
    return dim, position, position + 1
