"""Says which layouts of a tensor can be turned into which."""

from __future__ import annotations

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import CONVERSIONS, Layout, LayoutKind
from autopar.planner.graph.ops import TensorOrigin
from autopar.planner.programs.layouts.strategies import is_contiguous, is_cuttable


class Conversions:
    """The conversions of the tensors of one graph, at one batch.

    Shards of what ops compute are joined and cut in one block per part only. A parameter's shard is
    cut once, in any way, and never joined; a buffer that the model writes is not converted at all.
    Nor is memory that is written under one name and then read under an older one, for a conversion
    makes a tensor of its own, which later writes would miss; nor memory that is read by strides.
    """

    def __init__(self, graph: Graph, axes: GraphAxes, *, batch: int) -> None:
        self._graph, self._axes, self._batch = graph, axes, batch
        self._written = frozenset(buffer.name for buffer in graph.buffers if buffer.updated)
        self._fixed = _written_and_read(graph) | _strided(graph)

    def allow(self, tensor: str, produced: Layout, needed: Layout) -> bool:
        """Whether one layout of a tensor is turned into another, or need not be."""
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
            return False  # an all-to-all takes one dim apart and puts another together
        return all(self._is_contiguous(tensor, layout) for layout in (produced, needed))

    def _is_cuttable(self, tensor: str, layout: Layout) -> bool:
        return is_cuttable(self._axes.dims[tensor][layout.dim], layout.axis)

    def _is_contiguous(self, tensor: str, layout: Layout) -> bool:
        if layout.kind is not LayoutKind.SPLIT:
            return True
        return is_contiguous(self._axes.dims[tensor][layout.dim], layout.axis, self._batch)


def _written_and_read(graph: Graph) -> frozenset[str]:
    """Return the storages that an op writes to, and a later op reads by what was made before."""
    index = graph.index
    return frozenset(
        storage
        for storage, writers in index.writers.items()
        for name in index.lying_in[storage]
        for at in (index.places[op.name] for op in writers)
        if index.made_at(name) < at < index.last_read_at(name)
    )


def _strided(graph: Graph) -> frozenset[str]:
    """Return the storages of which an op reads what lies where, whoever made it."""
    return frozenset(
        graph.tensors[op.inputs[0]].storage
        for op in graph.ops
        if op.target.startswith("aten.as_strided")
    )
