"""Says what every op of a graph computes, moves and keeps, at one batch and one precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from autopar.planner.axes.infer import Axes
from autopar.planner.costs.ops.flops import backward_flops, forward_flops
from autopar.planner.costs.ops.kept import (
    Memory,
    made_by,
    made_elements,
    names_kept,
)
from autopar.planner.costs.ops.shapes import LocalShapes
from autopar.planner.costs.ops.traffic import moved_bytes
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Origin, Parameter
from autopar.planner.precision import (
    FUSED,
    GRADIENT_BYTES,
    Kernels,
    Precision,
    item_bytes,
    optimizer_bytes,
)
from autopar.planner.rules.rule import Rule, Traffic
from autopar.planner.rules.table import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one op, or a group of ops, does."""

    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            saved_bytes=self.saved_bytes + other.saved_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What parameters occupy between steps."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """The work of every op at one batch and precision; a tensor kept twice counts at its first."""

    batch: int
    precision: Precision
    ops: Mapping[str, Work]

    def total(self, ops: Iterable[Op]) -> Work:
        """Return the work of some ops together."""
        return sum((self.ops[op.name] for op in ops), Work())


def state_of(parameters: Iterable[Parameter], precision: Precision) -> State:
    """Return what parameters, gradients and the optimizer occupy.

    With AdamW in fp32: 4 bytes, 4 of gradient, 8 of moments. bf16, fp16: 2 bytes, 4 of fp32
    gradient, 4 of master weight and 8 of moments. Frozen parameters have neither gradient nor
    optimizer state.
    """
    weights = gradients = optimizer = 0
    for parameter in parameters:
        count = prod(size.at(0) for size in parameter.shape)
        weights += count * item_bytes(parameter.dtype, precision)
        if parameter.trainable:
            gradients += GRADIENT_BYTES * count
            optimizer += round(optimizer_bytes(precision, parameter.moments) * count)
    return State(parameter_bytes=weights, gradient_bytes=gradients, optimizer_bytes=optimizer)


def annotate(
    graph: Graph,
    axes: Axes,
    *,
    batch: int,
    precision: Precision,
    kernels: Kernels = FUSED,
) -> Annotation:
    """Return the work of every op."""
    annotator = _Annotator(graph, axes, batch, precision, kernels)
    works = {op.name: annotator.work(op) for op in graph.ops}
    return Annotation(batch=batch, precision=precision, ops=MappingProxyType(works))


class _Annotator:
    def __init__(
        self, graph: Graph, axes: Axes, batch: int, precision: Precision, kernels: Kernels
    ) -> None:
        self.graph = graph
        self.axes = axes
        self.batch = graph.fixed_batch or batch
        self.precision = precision
        self.kernels = kernels
        self.kept: set[str] = set()
        self.memory = Memory(graph, precision)

    def work(self, op: Op) -> Work:
        """Return the work of one op; tensors that it keeps are marked as kept."""
        rule = rule_of(op.target)
        shapes = LocalShapes(op, self.graph, self.axes.ops[op.name], batch=self.batch)
        differentiable = self.graph.learns(op)
        moved = 0
        if not self.memory.takes_none(op):
            moved = moved_bytes(op, self.graph, self._bytes)
        return Work(
            forward_flops=forward_flops(rule, shapes),
            backward_flops=backward_flops(rule, shapes),
            forward_bytes=moved,
            backward_bytes=self._moved_backward(rule, op, moved) if differentiable else 0,
            saved_bytes=self._made(rule, op, shapes) + self._newly_kept(rule, op),
        )

    def _bytes(self, name: str) -> int:
        tensor = self.graph.tensors[name]
        return tensor.expected_numel(self.batch) * item_bytes(tensor.dtype, self.precision)

    def _moved_backward(self, rule: Rule, op: Op, moved: int) -> int:
        """The gradient of each result is read, that of each input written, what was kept read."""
        if moved == 0 or rule.traffic is Traffic.GATHERED:
            return moved
        tensors = self.graph.tensors
        return moved + sum(self._bytes(name) for name in op.inputs if tensors[name].requires_grad)

    def _made(self, rule: Rule, op: Op, shapes: LocalShapes) -> int:
        made = made_by(op, rule, graph=self.graph, precision=self.precision, kernels=self.kernels)
        return sum(made_elements(one, shapes) * one.item_bytes for one in made)

    def _newly_kept(self, rule: Rule, op: Op) -> int:
        names = names_kept(op, rule, graph=self.graph, kernels=self.kernels)
        new = dict.fromkeys(root for root in map(self.memory.root, names) if root not in self.kept)
        self.kept.update(new)
        origins = (Origin.OP, Origin.INPUT)
        return sum(self._bytes(root) for root in new if self.graph.tensors[root].origin in origins)
