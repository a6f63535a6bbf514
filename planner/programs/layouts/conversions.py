"""Decides which layouts of a tensor can be converted to which."""

from __future__ import annotations

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import CONVERSIONS, Layout, LayoutKind
from autopar.planner.graph.ops import TensorOrigin
from autopar.planner.programs.layouts.strategies import is_contiguous, is_cuttable


class Conversions:
    """The conversions of a graph's tensors, at one batch.

    Shards of computed tensors are gathered and cut only if a shard is one block of each part. A
    parameter's shard is cut once, in any way, and never gathered. Not converted at all: a buffer
    that the model writes; memory that is written under one name and later read under an older one,
    because a conversion makes a copy that later writes would miss; memory that is read by strides.
    """

    def __init__(self, graph: Graph, axes: GraphAxes, *, batch: int) -> None:
        self._graph, self._axes, self._batch = graph, axes, batch
        self._written = frozenset(buffer.name for buffer in graph.buffers if buffer.updated)
        self._fixed = _written_and_read(graph) | _strided(graph)

    def allow(self, tensor: str, produced: Layout, needed: Layout) -> bool:
        """Whether a tensor's layout can be converted to another, or is equal to it."""
        if produced == needed:
            return True
        if (produced.kind, needed.kind) not in CONVERSIONS:
            return False
        if self._graph.tensors[tensor].storage in self._fixed:
            return False
        if self._graph.tensors[tensor].origin in (TensorOrigin.PARAMETER, TensorOrigin.BUFFER):
            if produced.kind is LayoutKind.SPLIT or tensor in self._written:
                return False
            return needed.kind is not LayoutKind.SPLIT or self._is_cuttable(tensor, needed)
        if produced.kind is needed.kind is LayoutKind.SPLIT and produced.dim == needed.dim:
            return False  # an all-to-all cuts one dim and gathers another
        return all(self._is_contiguous(tensor, layout) for layout in (produced, needed))

    def _is_cuttable(self, tensor: str, layout: Layout) -> bool:
        return is_cuttable(self._axes.dims[tensor][layout.dim], layout.axis)

    def _is_contiguous(self, tensor: str, layout: Layout) -> bool:
        if layout.kind is not LayoutKind.SPLIT:
            return True
        return is_contiguous(self._axes.dims[tensor][layout.dim], layout.axis, self._batch)


def _written_and_read(graph: Graph) -> frozenset[str]:
    """Return the storages that an op writes to, and a later op reads through an older tensor."""
    index = graph.index
    return frozenset(
        storage
        for storage, writers in index.writers.items()
        for name in index.lying_in[storage]
        for at in (index.places[op.name] for op in writers)
        if index.made_at(name) < at < index.last_read_at(name)
    )


def _strided(graph: Graph) -> frozenset[str]:
    """Return the storages that an op reads by strides."""
    return frozenset(
        graph.tensors[op.inputs[0]].storage
        for op in graph.ops
        if op.target.startswith("aten.as_strided")
    )
