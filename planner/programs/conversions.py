"""Says which layouts of a tensor can be turned into which."""

from __future__ import annotations

from autopar.planner.axes.infer import Axes
from autopar.planner.graph import Graph, Origin
from autopar.planner.layouts import CONVERSIONS, Kind, Layout
from autopar.planner.programs.cuts import is_contiguous, is_cuttable


class Conversions:
    """The conversions of the tensors of one graph, at one batch.

    Shards of what ops compute are joined and cut in one block per part only. A parameter's shard is
    cut once, in any way, and never joined; a buffer that the model writes is not converted at all.
    """

    def __init__(self, graph: Graph, axes: Axes, *, batch: int) -> None:
        self._graph, self._axes, self._batch = graph, axes, batch
        self._written = frozenset(buffer.name for buffer in graph.buffers if buffer.updated)

    def allow(self, tensor: str, produced: Layout, needed: Layout) -> bool:
        """Whether one layout of a tensor is turned into another, or need not be."""
        if produced == needed:
            return True
        if (produced.kind, needed.kind) not in CONVERSIONS:
            return False
        if self._graph.tensors[tensor].origin in (Origin.PARAMETER, Origin.BUFFER):
            if produced.kind is Kind.SPLIT or tensor in self._written:
                return False
            return needed.kind is not Kind.SPLIT or self._is_cuttable(tensor, needed)
        if produced.kind is needed.kind is Kind.SPLIT and produced.dim == needed.dim:
            return False  # an all-to-all takes one dim apart and puts another together
        return all(self._is_contiguous(tensor, layout) for layout in (produced, needed))

    def _is_cuttable(self, tensor: str, layout: Layout) -> bool:
        return is_cuttable(self._axes.dims[tensor][layout.dim], layout.axis)

    def _is_contiguous(self, tensor: str, layout: Layout) -> bool:
        if layout.kind is not Kind.SPLIT:
            return True
        return is_contiguous(self._axes.dims[tensor][layout.dim], layout.axis, self._batch)
