"""Traces a model again on longer or shorter rows: sizes that change depend on the rows' length.

A trace shows sizes as numbers: 1024 may be the width of the model or the length of its rows. Two
traces distinguish them, for the price of one more trace. With a symbol for each length, the
exporter would take two to four times as long, and a model that compares a length
(`if t > self.block_size`) would turn its symbol into a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.errors import InputError, TraceError
from autopar.planner.graph.graph import Graph, batch_key
from autopar.planner.model.model_file import ModelFile
from autopar.planner.precision import Precision
from autopar.planner.rules.signature import Dim, leaves
from autopar.planner.trace import trace
from autopar.planner.trace.build import TRACED_BATCH

_Place = tuple[str, int]  # the name of an input, and the dim
_Sizes = Mapping[_Place, int]
_SHORTEST = 3  # half of this is too short to be traced


def with_other_lengths(
    file: ModelFile, graph: Graph, axes: GraphAxes, precision: Precision
) -> Graph | None:
    """Return the graph of a model on longer or shorter rows, or None if neither works.

    Its ops are those of the given graph, one by one, with the same names. Lengths that do not
    depend on each other are resized differently, if the model allows it.
    """
    for sizes in _other_sizes(graph, axes):
        try:
            other = trace(
                replace(file, example_batch=partial(_resized, file, sizes)),
                precision=precision,
                batch_size=graph.fixed_batch or TRACED_BATCH,
                like=graph,
            )
        except (InputError, TraceError):
            continue
        if _is_alike(graph, other):
            return other
    return None


def _other_sizes(graph: Graph, axes: GraphAxes) -> Iterator[_Sizes]:
    """Yield other sizes of the inputs' dims, the most informative first.

    Twice the size plus one distinguishes halves that are rounded down and up. Twice the size is for
    models whose lengths must be multiples of a number, half the size for those with a maximum.
    """
    weight_axes = {
        leaf.name for p in graph.parameters for d in axes.dims[p.name] for leaf in leaves(d)
    }
    dims = {
        (name, place): dim
        for name in graph.inputs
        for place, dim in enumerate(axes.dims[name])
        if place and (size := graph.tensors[name].shape[place]).is_constant and size.at(0) > 1
    }
    free = {
        k: d for k, d in dims.items() if weight_axes.isdisjoint(leaf.name for leaf in leaves(d))
    }
    numbered = {k: d for k, d in dims.items() if graph.tensors[k[0]].is_whole_numbered}
    every = (free, numbered | free, numbered)
    choices = [one for place, one in enumerate(every) if one not in every[:place]]
    usual, last = zip(*(_ways(graph, chosen) for chosen in choices), strict=True)
    yield from (sizes for ways in (*usual, *last) for sizes in ways)


def _ways(graph: Graph, chosen: Mapping[_Place, Dim]) -> tuple[list[_Sizes], list[_Sizes]]:
    """Return two lists of sizes to try for some dims: larger ones, and smaller ones."""
    groups: list[Dim] = list(dict.fromkeys(chosen.values()))
    sizes = {key: graph.tensors[key[0]].shape[key[1]].at(0) for key in chosen}
    if not chosen or min(sizes.values()) <= _SHORTEST:
        return [], []
    unlike = {key: sizes[key] * (2 + groups.index(dim)) for key, dim in chosen.items()}
    double = {key: size * 2 for key, size in sizes.items()}
    half = {key: size // 2 for key, size in sizes.items()}
    more = [unlike, double] if len(groups) > 1 else [double]
    return [*map(_and_one, more), *more], [_and_one(half), half]


def _and_one(sizes: _Sizes) -> _Sizes:
    return {key: size + 1 for key, size in sizes.items()}


def _resized(file: ModelFile, sizes: _Sizes, rows: int) -> dict[str, Any]:
    """Return an example batch whose values are repeated or cut to other lengths."""
    batch = dict(file.example_batch(rows))
    for (name, dim), size in sizes.items():
        value = batch[batch_key(name)]
        times = -(-size // value.shape[dim])
        batch[batch_key(name)] = torch.cat([value] * times, dim).narrow(dim, 0, size).contiguous()
    return batch


def _is_alike(graph: Graph, other: Graph) -> bool:
    """Whether two graphs have equal ops, tensors and constants, but for sizes and arguments."""
    ops = [
        [(op.name, op.target, op.inputs, op.outputs, op.call) for op in g.ops]
        for g in (graph, other)
    ]
    tensors = [
        {(t.name, t.dtype, len(t.shape)) for t in g.tensors.values()} for g in (graph, other)
    ]
    constants = [{c.name: c.values for c in g.constants.values()} for g in (graph, other)]
    return all(first == second for first, second in (ops, tensors, constants))
