"""Turns writes to parts of tensors into ops, and finds rows that masks select, as in `x[mask]`.

A loop over experts selects the rows of each by `chosen == 0`, `chosen == 1`, and so on. While
planning, nobody knows how many rows each mask selects; it may be all. But together the masks select
every row once, so each is priced with an equal share.

`x[:, 1:] = y` becomes a slice_scatter, whose result is a new tensor. The reason: a plan may convert
the layout of the view `x[:, 1:]`, and a write to the converted copy would be lost. So where
gradients flow, a copy into slices or selections makes a new tensor, which later ops read. If a view
that is older than the write is read after it, the write stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.planner.errors import TraceError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import ModuleCall, Op, Ref, Tensor, TensorOrigin, Value, refs
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of
from autopar.planner.trace.symbols import depends_on_numbers

_PICKING = frozenset({torch.masked_select, torch.Tensor.masked_select})
_NUMBERS = (
    OpKind.ADDITION, OpKind.SUBTRACTION, OpKind.NEGATION, OpKind.MULTIPLICATION, OpKind.DIVISION,
    OpKind.POWER, OpKind.FILL, OpKind.RANGE,
)  # fmt: skip


def picked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Compute `masked_select` as `x[mask]`: then all selections by one mask have one symbolic size.

    Return None for other functions, and for a mask that is broadcast.
    """
    if func not in _PICKING:
        return None
    whole, mask = (*args, *kwargs.values())
    if whole.shape != mask.shape:  # x[mask] does not broadcast
        return None
    return torch.Tensor.__getitem__(whole, mask)


def mask_of(
    target: str, arguments: Mapping[str, Value], tensors: Mapping[str, Tensor]
) -> str | None:
    """Return the mask whose true entries an op selects or finds, or None."""
    if rule_of(target).kind is OpKind.PLACES:
        return next(refs(tuple(arguments.values())))
    if target == "aten.masked_select.default":  # the mask may be broadcast
        return next(refs(arguments["mask"]))
    if target != "aten.index.Tensor":
        return None
    (*indices,) = refs(arguments["indices"])
    is_mask = len(indices) == 1 and tensors[indices[0]].dtype == "bool"
    return indices[0] if is_mask else None


def refuse_counted(node: fx.Node, target: str, where: str) -> None:
    """Raise if the model computes with the number of selected entries, which no plan knows."""
    if rule_of(target).kind not in _NUMBERS:
        return
    for argument in node.args:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
        if depends_on_numbers(value):
            raise TraceError(
                "the model computes with the number of entries that a mask picks",
                where=where,
                expected="numbers that follow from the shapes of the batch, or tensors",
                fix="use mask.sum() instead",
            )


def with_expected_rows(graph: Graph) -> Graph:
    """Return the graph with `Tensor.expected` set for masks that share out the rows."""
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
    """Yield masks that differ only in the number they compare with, each with its share of rows."""
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
    """Return what a mask compares, the number it looks for, and how many numbers a row may match.

    The mask is `classes == number`, the same with several classes per row
    (`(chosen == number).any(-1)`), or the number's column of a one-hot tensor; else return None.
    """
    op = _behind_views(mask, graph)
    times = 1
    if op is not None and op.target == "aten.any.dim":
        before = graph.tensors[op.inputs[0]].shape
        dim = op.given("dim")
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
    """Return the op that made a tensor, ignoring views and casts."""
    op = graph.index.made_by.get(name)
    while op is not None and kind_of(op).keeps_entries:
        op = graph.index.made_by.get(op.inputs[0])
    return op


_COPY = "aten.copy_.default"


def with_scatters(graph: Graph) -> Graph:
    """Return the graph with copies into views replaced by ops that make new tensors."""
    scattering = _Scattering(graph)
    return scattering.scattered() if scattering.storages else graph


class _Scattering:
    """A graph whose copies into views become ops that make new tensors.

    `storages` are those whose writes can become scatters: only copies into views write to them, and
    after the first write, no view that is older than this write is read.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.index = graph, graph.index
        # the ops that take a part of a tensor, by the names of the views
        self.views = {op.outputs[0]: op for op in graph.ops if rule_of(op.target).written_by}
        self.storages = frozenset(
            storage
            for storage, ops in self.index.writers.items()
            if all(map(self._is_copy, ops)) and not self._is_stale(storage, ops[0])
        )
        self.tensors = dict(graph.tensors)
        self.newest: dict[str, str] = {}
        self.ops: list[Op] = []
        self.calls = dict(graph.calls)

    def _is_copy(self, op: Op) -> bool:
        tensors = self.graph.tensors
        if op.target != _COPY or op.writes[0] not in self.views:
            return False
        root, source = self._root(op.writes[0]), op.inputs[1]
        return (
            tensors[root].origin is TensorOrigin.OP
            and tensors[op.outputs[0]].requires_grad
            and tensors[source].dtype == tensors[root].dtype
            and not tensors[root].dtype.startswith("complex")  # torch has no gradient for these
            and tensors[root].storage == root
        )

    def _is_stale(self, storage: str, first: Op) -> bool:
        """Whether a view made before the first write is read after it."""
        written = self.index.places[first.name]
        return any(
            written < self.index.places[op.name]
            for name in self.index.lying_in[storage]
            if name != storage and self.index.made_at(name) < written
            for op in self.index.readers[name]
            if not (name in op.writes and self._is_first(name))
        )

    def _is_first(self, view: str) -> bool:
        """Whether a view is taken directly from its storage's tensor."""
        return view in self.views and self.views[view].inputs[0] not in self.views

    def _root(self, view: str) -> str:
        while view in self.views:
            view = self.views[view].inputs[0]
        return view

    def scattered(self) -> Graph:
        """Return the graph with scatters; each op reads the newest version of a tensor."""
        begin, end = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for key, ops in self.graph.index.ops_in.items():
            begin[ops[0].name].append(key)
            end[ops[-1].name].append(key)
        for op in self.graph.ops:
            for key in begin[op.name]:
                self.calls[key] = self._entered(self.calls[key])
            self._read(op)
            for key in end[op.name]:
                result = self._renamed(self.calls[key].result)
                self.calls[key] = replace(self.calls[key], result=result)
        return replace(
            self.graph,
            ops=tuple(self.ops),
            tensors=MappingProxyType(self.tensors),
            calls=MappingProxyType(self.calls),
            loss=self._name(self.graph.loss),
        )

    def _entered(self, call: ModuleCall) -> ModuleCall:
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
        """Add the op that puts the source in place of a view; return the name of its result."""
        base = cut.inputs[0]
        name = f"{op.name}_in_{base}"
        given = [(key, value) for key, value in cut.arguments if not isinstance(value, Ref)]
        arguments = (("self", Ref(self._name(base))), ("src", Ref(source)), *given)
        target = rule_of(cut.target).written_by
        self._append(op, name, target=target, arguments=arguments, like=self.tensors[base])
        return name

    def _widened(self, op: Op) -> str:
        """Return the source of a copy, expanded to the shape of the destination."""
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
            like, name=name, storage=name, origin=TensorOrigin.OP, requires_grad=True
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
