"""Makes pricers of zoo models on an A100, and the layouts of their layers."""

from functools import cache

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import GroupShape, group_shape
from autopar.planner.costs.ops.case import OpSplit
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import PARTIAL, REPLICATED, WHOLE, Layout, OpLayout, split
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Layer, Layers, find_layers
from autopar.planner.precision import Precision
from autopar.planner.rules.signature import leaves
from tests.planner.subjects import zoo_graph

GPT2 = ("gpt2.py", "size=124m")  # 12 heads, 768 wide, 1024 long, 50257 tokens, dropout 0.1


@cache
def known(*case: str) -> tuple[Graph, GraphAxes, Layers]:
    """Return a zoo model with its axes and layers."""
    graph = zoo_graph(*case)
    axes = infer_axes(graph)
    return graph, axes, find_layers(graph, axes)


def device(name: str = "a100") -> Device:
    """Return a device of the sheets."""
    return choose_cluster(8, name).nodes[0].device


def shape(degree: int) -> GroupShape:
    """Return the shape of a tensor group within a node."""
    return group_shape(choose_cluster(8, "a100"), degree, 1)


def pricer(
    *case: str,
    batch: int = 4,
    precision: Precision = Precision.BF16,
    device_name: str = "a100",
    measured: Measurements | None = None,
) -> OpPricer:
    """Return the pricer of a zoo model."""
    graph, axes, layers = known(*(case or GPT2))
    return OpPricer(
        graph, axes, batch=batch, precision=precision, device=device(device_name),
        measured=measured, layers=layers,
    )  # fmt: skip


def layer_of(prices: OpPricer, class_name: str) -> Layer:
    """Return the first layer of a class."""
    found = next(c for c in prices.layers.classes if c.name == class_name)
    return prices.layers.layers[found.layers[0]]


def op_of(prices: OpPricer, layer: Layer, kind: str, number: int = 0) -> Op:
    """Return an op of one kind in a layer."""
    assert prices.graph.ops
    return [op for op in layer.ops if op.target.split(".")[1] == kind][number]


def whole(layer: Layer) -> tuple[OpLayout, ...]:
    """Return the layouts of a layer that is not split."""
    return tuple(
        OpLayout(
            letter="", axis="", needs=(WHOLE,) * len(op.inputs), gives=(WHOLE,) * len(op.outputs)
        )
        for op in layer.ops
    )


def letter_along(prices: OpPricer, op: Op, axis_name: str, *, degree: int) -> OpSplit:
    """Return the split of an op along an axis by the name that people call it."""
    for letter, dim in prices.axes.ops[op.name].letters.items():
        for leaf in leaves(dim):
            if prices.axes.names[leaf.name] == axis_name:
                return OpSplit(letter=letter, axis=leaf.name, degree=degree)
    raise LookupError(f"{op.name} has no {axis_name}")


def megatron(prices: OpPricer, layer: Layer) -> tuple[OpLayout, ...]:
    """Return Megatron's tensor parallel layouts: heads and ffn split, the rest whole."""
    return tuple(_split_or_whole(prices, op) for op in layer.ops)


def weights(layer: Layer, layouts: tuple[OpLayout, ...], prices: OpPricer) -> dict[str, Layout]:
    """Return the layouts of a layer's parameters: those that their ops need; never P."""
    return {
        name: WHOLE if needed == PARTIAL else needed
        for op, layout in zip(layer.ops, layouts, strict=True)
        for name, needed in zip(op.inputs, layout.needs, strict=True)
        if name in prices.parameters
    }


def _split_or_whole(prices: OpPricer, op: Op) -> OpLayout:
    for axis_name in ("heads", "ffn"):
        try:
            chosen = letter_along(prices, op, axis_name, degree=2)
        except LookupError:
            continue
        gives = tuple(_layout(prices, name, chosen.axis, PARTIAL) for name in op.outputs)
        bias = PARTIAL if PARTIAL in gives else REPLICATED
        needs = tuple(_layout(prices, name, chosen.axis, bias) for name in op.inputs)
        return OpLayout(letter=chosen.letter, axis=chosen.axis, needs=needs, gives=gives)
    return OpLayout(
        letter="", axis="", needs=(WHOLE,) * len(op.inputs), gives=(WHOLE,) * len(op.outputs)
    )


def _layout(prices: OpPricer, name: str, axis: str, otherwise: Layout) -> Layout:
    for at, dim in enumerate(prices.axes.dims[name]):
        if any(leaf.name == axis for leaf in leaves(dim)):
            return split(axis, at)
    return otherwise
