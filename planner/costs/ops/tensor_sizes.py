"""Says how large a tensor of a graph is on one rank, in a layout, at one batch and precision."""

from __future__ import annotations

from math import prod

from autopar.planner.axes.infer import Axes
from autopar.planner.costs.ops.kept import Memory
from autopar.planner.costs.ops.shapes import local_size
from autopar.planner.graph import Graph
from autopar.planner.layouts import Kind, Layout
from autopar.planner.precision import Precision, item_bytes
from autopar.planner.rules.terms import Concat, leaves


class TensorSizes:
    """The sizes of one graph's tensors; each is worked out once."""

    def __init__(self, graph: Graph, axes: Axes, *, batch: int, precision: Precision) -> None:
        self.memory = Memory(graph, precision)
        self._graph = graph
        self._dims = axes.dims
        self._batch = batch
        self._precision = precision
        self._wholes: dict[str, int] = {}
        self._parts: dict[tuple[str, Layout, int], int] = {}

    def elements(self, name: str, layout: Layout, degree: int) -> int:
        """Return the elements of a tensor on one rank: of its split axis, ⌈size ÷ degree⌉."""
        if layout.kind is not Kind.SPLIT or degree == 1:
            return self._whole(name)
        key = name, layout, degree
        if key not in self._parts:
            elements = prod(
                local_size(
                    dim, self._batch, axis=layout.axis if at == layout.dim else "", degree=degree
                )
                for at, dim in enumerate(self._dims[name])
            )
            self._parts[key] = round(elements * self._graph.tensors[name].expected)
        return self._parts[key]

    def tensor_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes of a tensor on one rank."""
        dtype = self._graph.tensors[name].dtype
        return self.elements(name, layout, degree) * item_bytes(dtype, self._precision)

    def memory_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes on one rank of the memory that a tensor lies in.

        A view keeps all of its root's memory, split in the same proportion.
        """
        root = self.memory.root(name)
        if root == name:
            return self.tensor_bytes(name, layout, degree)
        elements = self._whole(root)
        is_split = layout.kind is Kind.SPLIT and degree > 1
        if is_split and self._holds(root, layout.axis):
            part = self.elements(name, layout, degree)
            elements = -(-elements * part // max(1, self._whole(name)))
        return elements * item_bytes(self._graph.tensors[root].dtype, self._precision)

    def is_one_piece(self, name: str, layout: Layout) -> bool:
        """Whether a rank's part of a tensor is one piece of the whole tensor's memory."""
        if layout.kind is not Kind.SPLIT:
            return True
        *before, dim = self._dims[name][: layout.dim + 1]
        first = next(leaves(dim)).name == layout.axis and not isinstance(dim, Concat)
        return first and prod(local_size(one, self._batch) for one in before) == 1

    def _holds(self, name: str, axis: str) -> bool:
        return any(leaf.name == axis for dim in self._dims[name] for leaf in leaves(dim))

    def _whole(self, name: str) -> int:
        if name not in self._wholes:
            self._wholes[name] = self._graph.tensors[name].expected_numel(self._batch)
        return self._wholes[name]
