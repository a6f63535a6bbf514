"""Lists every op of a graph with what it computes, moves, keeps and takes on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import networkx as nx

from autopar.planner.annotate import annotate
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.device import Device
from autopar.planner.costs.ops.pricer import Pricer
from autopar.planner.graph import Graph
from autopar.planner.layers import find_layers
from autopar.planner.ops import Tensor
from autopar.planner.precision import Precision, item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedOp:
    """One op, unsplit, at one batch and precision, and of how many layers alike it is the first."""

    name: str
    target: str
    module: str
    location: str
    layer: int
    count: int  # 0: as in the first layer of the class
    forward_flops: int
    backward_flops: int
    moved_bytes: int  # forward and backward
    kept_bytes: int  # for the backward
    forward_seconds: float
    backward_seconds: float


def annotated_ops(
    graph: Graph, *, batch: int, precision: Precision, device: Device
) -> tuple[AnnotatedOp, ...]:
    """Return the ops in the order in which they run."""
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    annotation = annotate(graph, axes, batch=batch, precision=precision)
    pricer = Pricer(graph, axes, batch=batch, precision=precision, device=device, layers=layers)
    layer_of = {op.name: number for number, one in enumerate(layers.layers) for op in one.ops}

    def lines() -> Iterator[AnnotatedOp]:
        for op in graph.ops:
            layer = layer_of[op.name]
            alike = layers.classes[layers.layers[layer].layer_class].layers
            work, cost = annotation.ops[op.name], pricer.cost(op)
            yield AnnotatedOp(
                name=op.name,
                target=op.target,
                module=graph.calls[op.call].path if op.call in graph.calls else op.call,
                location=op.location,
                layer=layer,
                count=len(alike) if alike[0] == layer else 0,
                forward_flops=work.forward_flops,
                backward_flops=work.backward_flops,
                moved_bytes=work.forward_bytes + work.backward_bytes,
                kept_bytes=work.saved_bytes,
                forward_seconds=cost.forward_seconds,
                backward_seconds=cost.backward_seconds,
            )

    return tuple(lines())


def annotated_graph(
    graph: Graph, ops: tuple[AnnotatedOp, ...], *, batch: int, precision: Precision
) -> nx.DiGraph:
    """Return the ops, and the tensors that no op makes, as a graph with an edge for each tensor.

    A tensor that no op makes (a parameter, an input) has the bytes that it holds.
    """
    found = nx.DiGraph()
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
        for name in op.inputs:
            tensor, maker = graph.tensors[name], makers[name].name if name in makers else name
            shape = _shape_text(tensor, batch)
            found.add_edge(maker, op.name, tensor=name, shape=shape, dtype=tensor.dtype)
    return found


def _shape_text(tensor: Tensor, batch: int) -> str:
    return " × ".join(str(size.at(batch)) for size in tensor.shape)
