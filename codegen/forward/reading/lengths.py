"""Tells which sizes of a graph follow the lengths of its inputs, from a trace of other lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from autopar.planner.axes.infer import Axes
from autopar.planner.extent import Extent
from autopar.planner.graph import Graph
from autopar.planner.ops import Call, FunctionCall, Op, Ref, Value
from autopar.planner.rules.terms import Dim, Leaf, substituted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What a graph's sizes are where its inputs have other lengths."""

    shapes: Mapping[str, tuple[Extent, ...]]
    arguments: Mapping[str, Mapping[str, Value]]  # of each op
    calls: Mapping[str, Call]
    functions: Sequence[FunctionCall]
    axes: Mapping[str, Extent]  # the sizes of axes


class Lengths:
    """A graph's sizes at other lengths, all the same where unknown; traced when first asked for."""

    def __init__(self, graph: Graph, axes: Axes, other: Callable[[], Graph | None]) -> None:
        self._graph, self._axes, self._other = graph, axes, other

    @cached_property
    def _sizes(self) -> _Sizes:
        other = self._other()
        return _UNKNOWN if other is None else _sizes_of(self._graph, self._axes, other)

    @property
    def are_known(self) -> bool:
        """Whether the model takes other lengths."""
        return bool(self._sizes.axes)

    def shape(self, tensor: str) -> tuple[Extent, ...]:
        """Return the other shape of a tensor."""
        return self._sizes.shapes.get(tensor, self._graph.tensors[tensor].shape)

    def argument(self, op: Op, name: str) -> Value:
        """Return what an argument of an op is at other lengths."""
        arguments = self._sizes.arguments
        return arguments[op.name][name] if op.name in arguments else op.argument(name)

    def call(self, unit: str) -> Call | None:
        """Return how a module is called at other lengths."""
        return self._sizes.calls.get(unit)

    def function(self, call: FunctionCall) -> FunctionCall:
        """Return how a plain function is called at other lengths."""
        pairs = zip(self._graph.functions, self._sizes.functions, strict=False)
        other = next((two for one, two in pairs if one is call), call)
        return other if _form(other) == _form(call) else call

    def dim(self, dim: Dim) -> Dim:
        """Return a dim with its other size."""
        axes = self._sizes.axes
        return substituted(dim, lambda leaf: Leaf(leaf.name, axes.get(leaf.name, leaf.size)))


_UNKNOWN = _Sizes(shapes={}, arguments={}, calls={}, functions=(), axes={})


def _form(call: FunctionCall) -> Value:
    """Return what is the same of a call at all lengths: the function, and where it has tensors."""
    names, values = tuple(zip(*call.keywords, strict=True)) or ((), ())
    return call.module, call.name, names, _nest(call.arguments), _nest(values)


def _nest(value: Value) -> Value:
    return tuple(map(_nest, value)) if isinstance(value, tuple) else isinstance(value, Ref)


def _sizes_of(graph: Graph, axes: Axes, other: Graph) -> _Sizes:
    shapes = {t.name: t.shape for t in other.tensors.values()}
    sizes = {
        dim.name: size
        for name in graph.tensors
        for dim, size in zip(axes.dims[name], shapes[name], strict=True)
        if isinstance(dim, Leaf)
    }
    return _Sizes(
        shapes=MappingProxyType(shapes),
        arguments=MappingProxyType({op.name: dict(op.arguments) for op in other.ops}),
        calls=other.calls,
        functions=other.functions,
        axes=MappingProxyType(sizes),
    )
