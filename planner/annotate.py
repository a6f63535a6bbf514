"""Computes each op's FLOPs, the bytes that it moves and saves for the backward, and its seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.cluster import Device
from autopar.planner.costs.ops.case import LocalShapes, backward_flops, forward_flops, moved_bytes
from autopar.planner.costs.ops.kept import TensorMemory, made_by, made_elements, names_kept
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import State
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op, Parameter, Tensor, TensorOrigin
from autopar.planner.layers import find_layers
from autopar.planner.precision import (
    FUSED,
    GRADIENT_BYTES,
    Precision,
    item_bytes,
    optimizer_bytes,
)
from autopar.planner.rules.rule import Traffic
from autopar.planner.rules.table import rule_of

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedOp:
    """An unsplit op, with its work and seconds at one batch and precision."""

    name: str
    target: str
    module: str
    location: str
    layer: int
    count: int  # the number of equal layers if the op is in the first of them; otherwise 0
    forward_flops: int
    backward_flops: int
    moved_bytes: int  # forward and backward
    kept_bytes: int  # for the backward
    forward_seconds: float
    backward_seconds: float


def annotated_ops(
    graph: Graph, *, batch: int, precision: Precision, device: Device
) -> tuple[AnnotatedOp, ...]:
    """Return all ops with their work and seconds, in the order in which they run."""
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    works = annotate(graph, axes, batch=batch, precision=precision)
    pricer = OpPricer(graph, axes, batch=batch, precision=precision, device=device, layers=layers)
    layer_of = {op.name: number for number, one in enumerate(layers.layers) for op in one.ops}

    def lines() -> Iterator[AnnotatedOp]:
        for op in graph.ops:
            layer = layer_of[op.name]
            alike = layers.classes[layers.layers[layer].layer_class].layers
            work, cost = works[op.name], pricer.cost(op)
            yield AnnotatedOp(
                name=op.name,
                target=op.target,
                module=graph.calls[op.call].path if op.call in graph.calls else op.call,
                location=op.location,
                layer=layer,
                count=len(alike) if alike[0] == layer else 0,
                forward_flops=work.forward_flops,
                backward_flops=work.backward_flops,
                moved_bytes=work.moved_bytes,
                kept_bytes=work.saved_bytes,
                forward_seconds=cost.forward_seconds,
                backward_seconds=cost.backward_seconds,
            )

    return tuple(lines())


def annotated_graph(
    graph: Graph, ops: tuple[AnnotatedOp, ...], *, batch: int, precision: Precision
) -> nx.MultiDiGraph:
    """Return a graph whose nodes are ops, and tensors that no op makes; its edges are tensors.

    An op that reads two results of another has two edges from it. Nodes of tensors (parameters and
    inputs) have their size in bytes.
    """
    import networkx as nx  # slow to import, and plans need no such graph

    found = nx.MultiDiGraph()
    known = {one.name: one for one in ops}
    makers = graph.index.made_by
    for name, tensor in graph.tensors.items():
        if name not in makers:
            elements = tensor.expected_numel(batch)
            found.add_node(
                name,
                kind=tensor.origin.value,
                dtype=tensor.dtype,
                shape=_shape_text(tensor, batch),
                held_bytes=elements * item_bytes(tensor.dtype, precision),
            )
    for op in graph.ops:
        found.add_node(op.name, kind="op", **asdict(known[op.name]))
    read = ((op.name, name) for op in graph.ops for name in dict.fromkeys(op.inputs))
    for number, (reader, name) in enumerate(read):  # GraphML needs an id for each edge
        tensor, maker = graph.tensors[name], makers[name].name if name in makers else name
        shape = _shape_text(tensor, batch)
        found.add_edge(maker, reader, key=number, tensor=name, shape=shape, dtype=tensor.dtype)
    return found


def _shape_text(tensor: Tensor, batch: int) -> str:
    return " × ".join(str(size.at(batch)) for size in tensor.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """The work of an op, or of a group of ops."""

    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """The bytes that forward and backward read and write."""
        return self.forward_bytes + self.backward_bytes

    def __add__(self, other: OpWork) -> OpWork:
        return OpWork(
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            saved_bytes=self.saved_bytes + other.saved_bytes,
        )


def state_of(parameters: Iterable[Parameter], precision: Precision) -> State:
    """Return the bytes of parameters, gradients and optimizer states.

    With AdamW in fp32, an element has 4 bytes of parameter, 4 of gradient and 8 of moments. In bf16
    and fp16 it has 2 of parameter, 4 of fp32 gradient, 4 of master weight and 8 of moments. Frozen
    parameters have neither gradient nor optimizer state.
    """
    weights = gradients = optimizer = 0
    for parameter in parameters:
        count = prod(size.at(0) for size in parameter.shape)
        weights += count * item_bytes(parameter.dtype, precision)
        if parameter.trainable:
            gradients += GRADIENT_BYTES * count
            optimizer += round(optimizer_bytes(precision, parameter.moments) * count)
    return State(
        parameter_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        trainable=gradients // GRADIENT_BYTES,
    )


def annotate(
    graph: Graph,
    axes: GraphAxes,
    *,
    batch: int,
    precision: Precision,
) -> Mapping[str, OpWork]:
    """Return the work of every op of a graph; a tensor counts once, when it is first saved."""
    annotator = _Annotator(graph, axes, batch, precision)
    return MappingProxyType({op.name: annotator.work(op) for op in graph.ops})


def total_work(ops: Iterable[Op], works: Mapping[str, OpWork]) -> OpWork:
    """Return the summed work of some ops."""
    return sum((works[op.name] for op in ops), OpWork())


def op_flops(op: Op, graph: Graph, axes: GraphAxes, *, batch: int) -> int:
    """Return the FLOPs of an op's forward and backward."""
    shapes = LocalShapes(op, graph, axes.ops[op.name], batch=batch)
    return forward_flops(shapes) + backward_flops(shapes)


class _Annotator:
    def __init__(self, graph: Graph, axes: GraphAxes, batch: int, precision: Precision) -> None:
        self.graph = graph
        self.axes = axes
        self.batch = graph.fixed_batch or batch
        self.precision = precision
        self.kept: set[str] = set()
        self.memory = TensorMemory(graph, precision)

    def work(self, op: Op) -> OpWork:
        """Return the work of an op, and note the tensors that it saves: each counts once."""
        shapes = LocalShapes(op, self.graph, self.axes.ops[op.name], batch=self.batch)
        differentiable = self.graph.learns(op)
        moved = 0
        if not self.memory.takes_none(op):
            moved = moved_bytes(op, self.graph, self._bytes)
        return OpWork(
            forward_flops=forward_flops(shapes),
            backward_flops=backward_flops(shapes),
            forward_bytes=moved,
            backward_bytes=self._moved_backward(op, moved) if differentiable else 0,
            saved_bytes=self._made(op, shapes) + self._newly_kept(op),
        )

    def _bytes(self, name: str) -> int:
        tensor = self.graph.tensors[name]
        return tensor.expected_numel(self.batch) * item_bytes(tensor.dtype, self.precision)

    def _moved_backward(self, op: Op, moved: int) -> int:
        """Return the bytes that an op's backward reads and writes.

        The estimate is what the forward moves, plus the gradients of the op's inputs. For an op
        that gathers entries of a table, these gradients are left out.
        """
        if moved == 0 or rule_of(op.target).traffic is Traffic.GATHERED:
            return moved
        tensors = self.graph.tensors
        return moved + sum(self._bytes(name) for name in op.inputs if tensors[name].requires_grad)

    def _made(self, op: Op, shapes: LocalShapes) -> int:
        made = made_by(op, graph=self.graph, precision=self.precision, kernels=FUSED)
        return sum(made_elements(one, shapes) * one.item_bytes for one in made)

    def _newly_kept(self, op: Op) -> int:
        names = names_kept(op, graph=self.graph, kernels=FUSED)
        new = dict.fromkeys(root for root in map(self.memory.root, names) if root not in self.kept)
        self.kept.update(new)
        origins = (TensorOrigin.OP, TensorOrigin.INPUT)
        return sum(self._bytes(root) for root in new if self.graph.tensors[root].origin in origins)
