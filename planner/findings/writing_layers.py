"""Finds the layers that write into what they are given, or whose results others write into.

Such a layer works on copies where it runs again or is a unit of `fully_shard`
(runtime/model/apart.py). Others may know what it writes there by its results alone then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from autopar.planner.errors import InputError
from autopar.planner.graph import Graph
from autopar.planner.ops import Call, Op, Origin, refs
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of

_OF_A_MATRIX = re.compile(r"aten\.(linear|matmul|einsum|tensordot)\.")


def writing_calls(graph: Graph, calls: Iterable[str]) -> frozenset[str]:
    """Return those of some calls that have to work on copies; refuse where these would differ."""
    if not any(True for _ in written(graph.ops, graph)):
        return frozenset()
    return frozenset(call for call in calls if call in graph.calls and _Borders(graph, call).matter)


def written(ops: Iterable[Op], graph: Graph) -> Iterator[str]:
    """Yield the storages of activations that ops write to, the batch among them.

    What the graph has as a scatter is a write into a part of a tensor in the code.
    """
    for op in ops:
        for name in op.inputs[:1] if kind_of(op) is OpKind.SCATTER else op.writes:
            storage = graph.tensors[name].storage
            if graph.tensors[storage].origin in (Origin.OP, Origin.INPUT):
                yield storage


class _Borders:
    """What is written across the borders of a call, from within or afterwards."""

    def __init__(self, graph: Graph, call: str) -> None:
        self.graph, self.call = graph, graph.calls[call]
        self.own = graph.index.ops_in[call]
        self.after = graph.ops[graph.index.places[self.own[-1].name] + 1 :] if self.own else ()
        self.results = graph.tensors.keys() & set(refs(self.call.result))

    @property
    def matter(self) -> bool:
        """Whether something is written across."""
        made = {name for op in self.own for name in op.outputs if self._storage(name) == name}
        given = frozenset(written(self.own, self.graph)) - made
        views = [
            name
            for name in self.results
            if self._storage(name) in made - {name}
            or (name in made and self._is_view_within(self.graph.index.made_by[name]))
        ]
        returned = frozenset(map(self._storage, views)).intersection(
            written(self.after, self.graph)
        )
        for storage in given:
            if self._is_seen(storage):
                self._refuse("writes into what it is given, and others read that afterwards")
        for storage in returned:
            if [self._storage(name) for name in self.results].count(storage) > 1:
                self._refuse("returns views of one tensor, and others write into one of them")
        return bool(given or returned)

    def _is_view_within(self, op: Op) -> bool:
        """Whether torch makes the result of an op as a view of a matrix, which no graph shows."""
        (result, *_) = op.outputs
        return bool(_OF_A_MATRIX.match(op.target)) and len(self.graph.tensors[result].shape) > 2

    def _is_seen(self, storage: str) -> bool:
        """Whether others would miss what the call writes, as one of its own inputs would."""
        given = self.graph.tensors.keys() & _given(self.call)
        if len([name for name in given if self._storage(name) == storage]) != 1:
            return True
        hidden = {name for op in self.own for name in op.outputs} - self.results
        known = set(self.results)
        for op in self.after:
            aliases = {name for name in op.inputs if self._storage(name) == storage}
            if aliases - known or not hidden.isdisjoint(op.inputs):
                return True
            known.update(op.outputs)
        return False

    def _storage(self, name: str) -> str:
        return self.graph.tensors[name].storage

    def _refuse(self, what: str) -> None:
        raise InputError(
            f"layer {self.call.path!r} {what}: a copy, which ZeRO-2 and 3 and recomputation need, "
            "would not be what they know",
            where=self.own[0].location,
            expected="a layer whose results alone tell what it wrote",
            fix="write without += and inplace=True there, or plan with zero=1 and recompute none",
        )


def _given(call: Call) -> frozenset[str]:
    return frozenset(refs((*call.arguments, *(value for _, value in call.keywords))))
