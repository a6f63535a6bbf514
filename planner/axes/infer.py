"""Infers the meaning of every dim of a graph, by unifying the dims that ops' signatures equate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from autopar.planner.axes.naming import Hint, Unifier, hints_of, named
from autopar.planner.graph.graph import Graph, once_per_graph
from autopar.planner.graph.ops import Extent, Op, TensorOrigin
from autopar.planner.rules.signature import (
    Case,
    Concat,
    Dim,
    Leaf,
    Signature,
    leaves,
    substituted,
    text_of,
    tiles_of,
)
from autopar.planner.rules.table import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A dim of an op's input that does not fit the op's signature.

    Other ops flatten or concatenate the dim in another way. It is not split in this op.
    """

    op: str
    tensor: str
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpAxes:
    """An op's signature, and the logical axes of its letters."""

    signature: Signature
    letters: Mapping[str, Dim]


@dataclass(frozen=True, kw_only=True)  # no slots, because of a cached property
class GraphAxes:
    """The dims of every tensor in logical axes, and the axes of each op's letters.

    A leaf is one axis. `names` has its name, which is its size if no op proposed a name.
    """

    dims: Mapping[str, tuple[Dim, ...]]
    ops: Mapping[str, OpAxes]
    conflicts: tuple[Conflict, ...]
    names: Mapping[str, str]

    def text(self, dim: Dim) -> str:
        """Return a dim with the names of its axes, for people."""
        return text_of(substituted(dim, lambda leaf: Leaf(self.names[leaf.name], leaf.size)))

    def batch_form(self, *, degree: int, batch: int) -> tuple[tuple[bool, bool], ...]:
        """Return a key: batches with equal keys have the same strategies and conversions.

        They depend on whether an axis has a position for every rank, and whether it has only one.
        """
        sizes = [size.at(batch) for size in self._sizes_of_rows]
        return tuple((size >= degree, size == 1) for size in sizes)

    @cached_property
    def _sizes_of_rows(self) -> tuple[Extent, ...]:
        """The distinct sizes that depend on the batch, of axes of tensors and of ops' letters."""
        letters = (dim for op in self.ops.values() for dim in op.letters.values())
        dims = (*(dim for own in self.dims.values() for dim in own), *letters)
        sizes = (leaf.size for dim in dims for leaf in leaves(dim))
        return tuple(dict.fromkeys(size for size in sizes if not size.is_constant))

    @cached_property
    def of_rows(self) -> frozenset[str]:
        """The axes whose sizes depend on the batch."""
        found = (leaf for dims in self.dims.values() for dim in dims for leaf in leaves(dim))
        return frozenset(leaf.name for leaf in found if not leaf.size.is_constant)


@once_per_graph
def infer_axes(graph: Graph) -> GraphAxes:
    """Return the logical axes of a graph."""
    inference = _Inference(graph)
    for op in graph.ops:
        inference.read(op)
    return inference.axes()


class _Inference:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.unifier = Unifier()
        self.tiles = tiles_of(graph)
        self.conflicts: list[Conflict] = []
        self.ops: dict[str, tuple[Signature, dict[str, Dim]]] = {}
        self.hints: list[Hint] = []
        self.dims: dict[str, tuple[Dim, ...]] = {
            tensor.name: tuple(map(self.unifier.fresh, tensor.shape))
            for tensor in graph.tensors.values()
            if tensor.origin is not TensorOrigin.OP
        }
        # the first dims of all inputs are equal: each is the batch
        firsts = [self.dims[name][0] for name in graph.inputs if self.dims[name]]
        for other in firsts[1:]:
            self.unifier.unify(firsts[0], other)

    def read(self, op: Op) -> None:
        """Apply an op's signature to its tensors."""
        case = Case(op=op, tensors=self.graph.tensors, tiles=self.tiles.get(op.name))
        rule = rule_of(op.target)
        signature = rule.signature(case)
        letters: dict[str, Dim] = {}

        def instantiated(dim: Dim) -> Dim:
            return substituted(
                dim,
                lambda leaf: letters.setdefault(leaf.name, self.unifier.fresh(leaf.size)),
            )

        for tensor, dims in signature.operands:
            for i, dim in enumerate(dims):
                if not self.unifier.unify(self.dims[tensor][i], instantiated(dim)):
                    self.conflicts.append(Conflict(op=op.name, tensor=tensor, dim=i))
        for tensor, dims in signature.results:
            self.dims[tensor] = tuple(instantiated(dim) for dim in dims)
        for tensor in op.outputs:
            if tensor not in self.dims:
                shape = self.graph.tensors[tensor].shape
                self.dims[tensor] = tuple(map(self.unifier.fresh, shape))
        self.ops[op.name] = (signature, letters)
        self.hints += hints_of(op, rule, signature, letters, self.graph)

    def axes(self) -> GraphAxes:
        """Return all dims in terms of the leaves that are free after unification: the axes."""
        names, whole_names = named(self.graph, self.dims, self.unifier, self.hints)

        def final(dim: Dim) -> Dim:
            top = self.unifier.structure(dim)
            if isinstance(top, Leaf):
                return top
            resolved = substituted(top, final)
            if isinstance(resolved, Concat):
                return Concat(resolved.parts, whole_names.get(self.unifier.resolved(top), ""))
            return resolved

        return GraphAxes(
            dims=MappingProxyType(
                {
                    name: tuple(substituted(d, final) for d in dims)
                    for name, dims in self.dims.items()
                    if name in self.graph.tensors
                }
            ),
            ops=MappingProxyType(
                {
                    name: OpAxes(
                        signature=signature,
                        letters=MappingProxyType({k: final(v) for k, v in letters.items()}),
                    )
                    for name, (signature, letters) in self.ops.items()
                }
            ),
            conflicts=tuple(self.conflicts),
            names=MappingProxyType(names),
        )
