"""Small graphs of a few ops in a few layers, for comparison with brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import (
    MODEL_DTYPE,
    Extent,
    ModuleCall,
    Op,
    Parameter,
    Ref,
    Tensor,
    TensorOrigin,
    Value,
)
from autopar.planner.layers import Layer, LayerClass, Layers

BATCH = Extent.of(0, 1)
WIDTH = Extent.of(4)
ROWS = (BATCH, WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One op of a block: what it is, and which earlier value (0 is the block's input) it takes."""

    kind: str  # linear, biased, norm, gelu, add, mul, scaled
    first: int
    second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """A graph in layers."""

    graph: Graph
    axes: GraphAxes
    layers: Layers


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parameters: list[Parameter] = []
        self.ops: list[Op] = []

    def tensor(
        self, name: str, shape: tuple[Extent, ...], origin: TensorOrigin, *, grad: bool
    ) -> str:
        self.tensors[name] = Tensor(
            name=name, shape=shape, dtype=MODEL_DTYPE, storage=name, origin=origin,
            requires_grad=grad,
        )  # fmt: skip
        return name

    def parameter(self, name: str, *shape: Extent) -> str:
        self.parameters.append(
            Parameter(name=name, aliases=(name,), shape=shape, dtype=MODEL_DTYPE, trainable=True)
        )
        return self.tensor(name, shape, TensorOrigin.PARAMETER, grad=True)

    def op(self, name: str, target: str, shape: tuple[Extent, ...], /, **arguments: Value) -> str:
        inputs = tuple(value.tensor for value in arguments.values() if isinstance(value, Ref))
        grad = any(self.tensors[i].requires_grad for i in inputs)
        self.ops.append(
            Op(
                name=name, target=target, arguments=tuple(arguments.items()), inputs=inputs,
                outputs=(name,), call="", grad_enabled=True,
            )
        )  # fmt: skip
        return self.tensor(name, shape, TensorOrigin.OP, grad=grad)

    def step(self, step: Step, name: str, values: Sequence[str]) -> str:
        x, y = (Ref(values[i % len(values)]) for i in (step.first, step.second))
        match step.kind:
            case "linear" | "biased":
                weight = Ref(self.parameter(f"{name}.weight", WIDTH, WIDTH))
                bias = Ref(self.parameter(f"{name}.bias", WIDTH)) if step.kind == "biased" else None
                return self.op(name, "aten.linear.default", ROWS, input=x, weight=weight, bias=bias)
            case "norm":
                weight = Ref(self.parameter(f"{name}.weight", WIDTH))
                return self.op(name, "aten.rms_norm.default", ROWS, input=x, weight=weight)
            case "add":
                return self.op(name, "aten.add.Tensor", ROWS, self=x, other=y, alpha=1)
            case "mul":
                return self.op(name, "aten.mul.Tensor", ROWS, self=x, other=y)
            case "scaled":
                return self.op(name, "aten.mul.Scalar", ROWS, self=x, other=2.0)
        return self.op(name, "aten.gelu.default", ROWS, self=x)


def small_model(steps: Sequence[Step], blocks: int) -> SmallModel:
    """Return a model of equal blocks in a row, and a sum as its loss."""
    writer = _Writer()
    value = writer.op("start", "aten.mul.Tensor", ROWS,
                      self=Ref(writer.tensor("x", ROWS, TensorOrigin.INPUT, grad=False)),
                      other=Ref(writer.parameter("scale", WIDTH)))  # fmt: skip
    ends = [len(writer.ops)]
    for block in range(blocks):
        values = [value]
        for i, step in enumerate(steps):
            values.append(writer.step(step, f"b{block}.{i}", values))
        value = values[-1]
        ends.append(len(writer.ops))
    writer.op("loss", "aten.sum.default", (), self=Ref(value), dtype=None)
    ends.append(len(writer.ops))
    graph = Graph(
        ops=tuple(writer.ops), tensors=writer.tensors, parameters=tuple(writer.parameters),
        buffers=(), constants={}, inputs=("x",), calls=dict[str, ModuleCall](), loss="loss",
        fixed_batch=None,
    )  # fmt: skip
    classes = (0, *([1] * blocks), 2)
    starts = (0, *ends[:-1])
    layers = tuple(
        Layer(call="", ops=graph.ops[start:end], layer_class=number)
        for start, end, number in zip(starts, ends, classes, strict=True)
    )
    members = [tuple(i for i, c in enumerate(classes) if c == number) for number in range(3)]
    return SmallModel(
        graph=graph,
        axes=infer_axes(graph),
        layers=Layers(
            layers=layers,
            classes=tuple(LayerClass(name=f"c{i}", layers=own) for i, own in enumerate(members)),
            runs=(),
        ),
    )
