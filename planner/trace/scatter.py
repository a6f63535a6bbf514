"""Turns writes into a part of a tensor into new tensors: `x[:, 1:] = y` becomes a slice_scatter.

A split may convert a view, and what is written to the converted view is lost to the tensor that it
shows. So where gradients flow, a copy into slices and selections of a tensor makes a new tensor,
and what comes later reads that one. Where another view, made before, is read after the write, the
write is left as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.planner.graph import Call, Graph, Op, Origin, Ref, Tensor, Value
from autopar.planner.rules.table import rule_of

_COPY = "aten.copy_.default"


def with_scatters(graph: Graph) -> Graph:
    """Return the graph with copies into views as ops that make new tensors."""
    written = _Written(graph).storages()
    return _Scattering(graph, written).scattered() if written else graph


class _Written:
    """Finds the storages that are written by copies into views alone, and read as if they were new.

    Positions in the list of ops tell what is made before a write and read after it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = {out: i for i, op in enumerate(graph.ops) for out in op.outputs}
        self.views = views_of(graph)

    def storages(self) -> frozenset[str]:
        """Return the names of the storages."""
        first: dict[str, int] = {}
        refused: set[str] = set()
        for i, op in enumerate(self.graph.ops):
            for name in op.writes:
                storage = self.graph.tensors[name].storage
                first.setdefault(storage, i)
                if not self._is_copy(op):
                    refused.add(storage)
            refused |= set(self._stale(i, op, first))
        return frozenset(first.keys() - refused)

    def _is_copy(self, op: Op) -> bool:
        tensors = self.graph.tensors
        if op.target != _COPY or op.writes[0] not in self.views:
            return False
        root, source = self._root(op.writes[0]), op.inputs[1]
        return (
            tensors[root].origin is Origin.OP
            and tensors[op.outputs[0]].requires_grad
            and tensors[source].dtype == tensors[root].dtype
            and not tensors[root].dtype.startswith("complex")  # torch has no gradient of that
            and tensors[root].storage == root
        )

    def _stale(self, i: int, op: Op, first: Mapping[str, int]) -> Iterator[str]:
        """Yield the storages of which an op reads a view that was made before the first write."""
        for name in op.inputs:
            storage = self.graph.tensors[name].storage
            written = first.get(storage, i)
            is_old = self.made.get(name, i) < written < i
            if is_old and name != storage and not (name in op.writes and self._is_first(name)):
                yield storage

    def _is_first(self, view: str) -> bool:
        """Whether a view shows its storage without another view between them."""
        return view in self.views and self.views[view].inputs[0] not in self.views

    def _root(self, view: str) -> str:
        while view in self.views:
            view = self.views[view].inputs[0]
        return view


class _Scattering:
    def __init__(self, graph: Graph, storages: frozenset[str]) -> None:
        self.graph = graph
        self.storages = storages
        self.views = views_of(graph)
        self.tensors = dict(graph.tensors)
        self.newest: dict[str, str] = {}
        self.ops: list[Op] = []
        self.calls = dict(graph.calls)

    def scattered(self) -> Graph:
        """Read the ops in order; each reads the newest tensors."""
        spans = _spans(self.graph)
        for i, op in enumerate(self.graph.ops):
            for key in spans.begin.get(i, ()):
                self.calls[key] = self._entered(self.calls[key])
            self._read(op)
            for key in spans.end.get(i, ()):
                result = self._renamed(self.calls[key].result)
                self.calls[key] = replace(self.calls[key], result=result)
        return replace(
            self.graph,
            ops=tuple(self.ops),
            tensors=MappingProxyType(self.tensors),
            calls=MappingProxyType(self.calls),
            loss=self._name(self.graph.loss),
        )

    def _entered(self, call: Call) -> Call:
        return replace(
            call,
            arguments=tuple(map(self._renamed, call.arguments)),
            keywords=tuple((name, self._renamed(value)) for name, value in call.keywords),
        )

    def _read(self, op: Op) -> None:
        if op.writes and self.graph.tensors[op.writes[0]].storage in self.storages:
            self._scatter(op)
            return
        arguments = tuple((name, self._renamed(value)) for name, value in op.arguments)
        self.ops.append(replace(op, arguments=arguments, inputs=tuple(map(self._name, op.inputs))))
        for name in op.outputs:
            storage = self.tensors[name].storage
            if storage in self.storages and storage != name:
                newest = self.tensors[self._name(storage)].storage
                self.tensors[name] = replace(self.tensors[name], storage=newest)

    def _scatter(self, op: Op) -> None:
        view, source = op.writes[0], self._widened(op)
        self.newest[op.outputs[0]] = source
        while view in self.views:
            self.newest[view] = source
            cut = self.views[view]
            view = cut.inputs[0]
            if self.tensors[view].shape != self.tensors[cut.outputs[0]].shape:
                source = self._put(op, source, cut)
        self.newest[view] = source

    def _put(self, op: Op, source: str, cut: Op) -> str:
        """Return a tensor that has the source where a view was cut out."""
        base = cut.inputs[0]
        name = f"{op.name}_in_{base}"
        given = [(key, value) for key, value in cut.arguments if not isinstance(value, Ref)]
        arguments = (("self", Ref(self._name(base))), ("src", Ref(source)), *given)
        target = rule_of(cut.target).written_by
        self._append(op, name, target=target, arguments=arguments, like=self.tensors[base])
        return name

    def _widened(self, op: Op) -> str:
        """Return the source of a copy, repeated to the shape of what it is copied to."""
        source, shape = self._name(op.inputs[1]), self.tensors[op.writes[0]].shape
        if self.tensors[source].shape == shape:
            return source
        name = f"{op.name}_expanded"
        self._append(
            op,
            name,
            target="aten.expand.default",
            arguments=(("self", Ref(source)), ("size", shape), ("implicit", False)),
            like=self.tensors[op.writes[0]],
        )
        return name

    def _append(
        self,
        op: Op,
        name: str,
        *,
        target: str,
        arguments: tuple[tuple[str, Value], ...],
        like: Tensor,
    ) -> None:
        inputs = tuple(value.tensor for _, value in arguments if isinstance(value, Ref))
        self.tensors[name] = replace(
            like, name=name, storage=name, origin=Origin.OP, requires_grad=True
        )
        made = replace(
            op, name=name, target=target, arguments=arguments, inputs=inputs, outputs=(name,)
        )
        self.ops.append(replace(made, writes=()))

    def _name(self, name: str) -> str:
        while name in self.newest:
            name = self.newest[name]
        return name

    def _renamed(self, value: Value) -> Value:
        if isinstance(value, Ref):
            return Ref(self._name(value.tensor))
        return type(value)(map(self._renamed, value)) if isinstance(value, tuple) else value


class _Spans:
    """The calls that begin before an op, and those that end after it, by position."""

    def __init__(self) -> None:
        self.begin: dict[int, list[str]] = {}
        self.end: dict[int, list[str]] = {}


def _spans(graph: Graph) -> _Spans:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        call: str | None = op.call
        while call is not None and call in graph.calls:
            first.setdefault(call, i)
            last[call] = i
            call = graph.calls[call].parent
    spans = _Spans()
    for key in first:
        spans.begin.setdefault(first[key], []).append(key)
        spans.end.setdefault(last[key], []).append(key)
    return spans


def views_of(graph: Graph) -> Mapping[str, Op]:
    """Return the ops that show a part of a tensor, by the names of the views."""
    return {op.outputs[0]: op for op in graph.ops if rule_of(op.target).written_by}
