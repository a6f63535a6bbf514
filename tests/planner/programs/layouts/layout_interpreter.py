"""Runs a traced graph on simulated ranks in its layouts, to compare it with the unsplit model.

Every rank has a tensor of its own; conversions are functions of the lists of all ranks' tensors,
with the backward that the table of layouts says. Dropout is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout, ParameterLayout
from autopar.planner.graph.ops import DType, Extent, Op, Ref, TensorOrigin, Value
from autopar.planner.layers import Layers
from autopar.planner.programs.layouts.rules import find_slots, own_layouts
from autopar.planner.programs.layouts.strategies import parts_of
from autopar.planner.rules.signature import size_of
from tests.planner.programs.layouts.simulated_ranks import Converted, Cut, Ranks

_RESHAPES = (
    "aten.view.",
    "aten.reshape.",
    "aten._unsafe_view.",
    "aten.flatten.",
    "aten.unflatten.",
    "aten.squeeze.",
)


class Interpreter:
    """One graph with the layouts of one plan, on some ranks."""

    def __init__(
        self,
        graph: Graph,
        axes: GraphAxes,
        layers: Layers,
        *,
        layouts: Sequence[Sequence[OpLayout]],
        outside: Sequence[ParameterLayout],
        ranks: int,
        batch: int,
    ) -> None:
        self.graph, self.axes, self.ranks, self.batch = graph, axes, ranks, batch
        self.outside = {own.name: own.layout for own in outside}
        self.values: dict[str, tuple[Layout, Ranks]] = {}
        self.crossed: dict[str, tuple[Layout, Ranks]] = {}
        slots = find_slots(graph, axes, layers)
        self.strategy: dict[str, OpLayout] = {}
        self.layer_of: dict[str, int] = {}
        self.maker: dict[str, int] = {}
        for i, layer in enumerate(layers.layers):
            own = own_layouts(tuple(map(tuple, layouts)), layer, axes, slots)
            for op, strategy in zip(layer.ops, own, strict=True):
                self.strategy[op.name], self.layer_of[op.name] = strategy, i
                self.maker.update(dict.fromkeys(op.outputs, i))

    def cut(self, name: str, layout: Layout) -> Cut | None:
        if layout.kind is not LayoutKind.SPLIT:
            return None
        parts = parts_of(self.axes.dims[name][layout.dim], layout.axis, self.batch)
        return Cut(layout.dim, parts, self.ranks)

    def place(self, name: str, whole: Tensor) -> Ranks:
        """Lay a tensor from outside on the ranks, in its layout."""
        layout = self.outside.get(name, WHOLE)
        cut = self.cut(name, layout)
        shards = [cut.shard(whole, r) if cut else whole.clone() for r in range(self.ranks)]
        needs_grad = self.graph.tensors[name].requires_grad
        leaves = [shard.detach().requires_grad_(needs_grad) for shard in shards]
        self.values[name] = (layout, leaves)
        return leaves

    def run(self) -> Ranks:
        """Run all ops; return the loss of every rank."""
        for op in self.graph.ops:
            strategy = self.strategy[op.name]
            inputs = [
                self._converted(name, need, op)
                for name, need in zip(op.inputs, strategy.needs, strict=True)
            ]
            with torch.set_grad_enabled(op.grad_enabled):
                results = self._results(op, strategy, inputs)
            for k, name in enumerate(op.outputs):
                made = [outs[k] for outs in results]
                self.values[name] = (strategy.gives[k], made)
                if name in self.outside:
                    crossing = self.outside[name]
                    self.crossed[name] = (
                        crossing,
                        self._turned(name, strategy.gives[k], crossing, made),
                    )
        layout, losses = self.values[self.graph.loss]
        return self._turned(self.graph.loss, layout, WHOLE, losses)

    def _converted(self, name: str, need: Layout, op: Op) -> Ranks:
        is_inside = self.maker.get(name, -1) == self.layer_of[op.name]
        layout, values = (
            self.values[name] if is_inside or name not in self.crossed else self.crossed[name]
        )
        return self._turned(name, layout, need, values)

    def _turned(self, name: str, before: Layout, after: Layout, values: Ranks) -> Ranks:
        if before == after:
            return values
        steps = before.kind.value + after.kind.value
        cuts = self.cut(name, before), self.cut(name, after)
        return list(Converted.apply(steps, *cuts, *values))  # type: ignore[no-untyped-call]

    # --- one op on every rank

    def _results(self, op: Op, strategy: OpLayout, inputs: list[Ranks]) -> list[list[Tensor]]:
        first = strategy.needs[0] if strategy.needs else WHOLE
        if first.kind is LayoutKind.SPLIT and strategy.gives[0] == WHOLE:
            # the runtime's function for the split op adds up the ranks' terms itself
            inputs = [self._turned(op.inputs[0], first, WHOLE, inputs[0]), *inputs[1:]]
        return [
            self._on_rank(op, strategy, [values[rank] for values in inputs], rank)
            for rank in range(self.ranks)
        ]

    def _on_rank(self, op: Op, strategy: OpLayout, inputs: list[Tensor], rank: int) -> list[Tensor]:
        shapes = [
            self._local_shape(name, layout, rank)
            for name, layout in zip(op.outputs, strategy.gives, strict=True)
        ]
        if op.target.startswith("aten.dropout"):
            return [inputs[0].clone()]
        if op.target.startswith(_RESHAPES):
            return [inputs[0].reshape(shapes[0])]
        if op.target.startswith(("aten.expand.", "aten.expand_as.", "aten.broadcast_to.")):
            return [inputs[0].expand(shapes[0])]
        if op.target.startswith(("aten.chunk.", "aten.split")):
            dim = op.argument("dim")
            assert isinstance(dim, int)
            return list(torch.split(inputs[0], [shape[dim] for shape in shapes], dim))
        is_lookup = op.target == "aten.embedding.default"
        if is_lookup and strategy.needs[0].kind is LayoutKind.SPLIT and strategy.needs[0].dim == 0:
            return [self._partial_rows(op, strategy, inputs, rank)]
        if (
            op.target.startswith("aten.embedding_bag.")
            and strategy.needs[0].kind is LayoutKind.SPLIT
        ):
            cut = self.cut(op.inputs[0], strategy.needs[0])
            assert cut is not None
            if cut.dim == 0:  # rows of other ranks are zeros here
                return list(called(op, [cut.padded(inputs[0], rank), *inputs[1:]], self.batch))
            return list(
                called(op, inputs, self.batch, exact=True)
            )  # what nobody reads, of any size
        if op.target.startswith("aten.conv") and strategy.needs[1].kind is LayoutKind.SPLIT:
            op = self._with_own_groups(op, inputs, shapes[0][1])
        result = called(op, inputs, self.batch, exact=True)
        if op.target == "aten.repeat.default" and strategy.needs[0].kind is not LayoutKind.SPLIT:
            cut = self.cut(op.outputs[0], strategy.gives[0])  # what is split may be the repetitions
            result = cut.shard(result, rank) if cut is not None else result
        if op.target.startswith("aten.mean."):
            cut = self.cut(op.inputs[0], strategy.needs[0])
            if cut is not None and strategy.gives[0].kind is LayoutKind.PARTIAL:
                result = result * (len(cut.places[rank]) / cut.size)  # of the whole mean
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        for out, shape in zip(outputs, shapes, strict=True):
            assert list(out.shape) == shape, (op.name, op.target, list(out.shape), shape)
        return outputs

    def _with_own_groups(self, op: Op, inputs: list[Tensor], channels: int) -> Op:
        """Return a convolution with as many groups as this rank's part has.

        Each group has so many channels as a weight's second dim: of the input, or of the result
        (`channels`) where it is transposed.
        """
        grouped = channels if "transpose" in op.target else inputs[0].shape[1]
        groups = grouped // inputs[1].shape[1]
        given = tuple((key, groups if key == "groups" else value) for key, value in op.arguments)
        return replace(op, arguments=given)

    def _partial_rows(self, op: Op, strategy: OpLayout, inputs: list[Tensor], rank: int) -> Tensor:
        """Rows that this rank holds, zeros for the others."""
        cut = self.cut(op.inputs[0], strategy.needs[0])
        assert cut is not None
        local = torch.full((cut.size,), -1)
        local[cut.places[rank]] = torch.arange(len(cut.places[rank]))
        ids = local[inputs[1]]
        padding = op.argument("padding_idx")
        assert isinstance(padding, int)
        own = int(local[padding]) if padding >= 0 else -1
        rows = torch.nn.functional.embedding(
            ids.clamp(min=0), inputs[0], padding_idx=own if own >= 0 else None
        )
        return rows * (ids >= 0).unsqueeze(-1)

    def _local_shape(self, name: str, layout: Layout, rank: int) -> list[int]:
        shape = [size_of(dim).at(self.batch) for dim in self.axes.dims[name]]
        cut = self.cut(name, layout)
        if cut is not None:
            shape[cut.dim] = len(cut.places[rank])
        return shape


def called(op: Op, inputs: Sequence[Tensor], batch: int, *, exact: bool = False) -> Any:
    """Call an op with its tensors; the model's own type is float64 where numbers are exact."""
    rest = iter(inputs)
    own = torch.float64 if exact else torch.float32

    def meant(key: str, value: Value) -> Any:
        if isinstance(value, Ref):
            return next(rest)
        if isinstance(value, DType):
            is_own = value.name == "model" or (exact and value.name == "float32")
            return own if is_own else getattr(torch, value.name)
        if isinstance(value, Extent):
            return value.at(batch)
        if isinstance(value, tuple):
            return [meant(key, item) for item in value]
        if isinstance(value, str) and value.startswith("torch."):  # a memory format, by its name
            return getattr(torch, value.removeprefix("torch."))
        return "cpu" if key == "device" and value is not None else value

    arguments = {key: meant(key, value) for key, value in op.arguments}
    if "scaled_dot_product_attention" in op.target:
        arguments["dropout_p"] = 0.0
    namespace, name, overload = op.target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)(**arguments)


def tensors_from_outside(
    graph: Graph, given: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: int
) -> dict[str, Tensor]:
    """Return what the graph starts from: random parameters, the model's buffers, a real batch."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, tensor in graph.tensors.items():
        shape = [size.at(batch) for size in tensor.shape]
        if tensor.origin is TensorOrigin.PARAMETER:
            found[name] = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        elif tensor.origin is TensorOrigin.BUFFER:
            found[name] = _exact(buffers[name]).clone()
        elif tensor.origin is TensorOrigin.INPUT:
            found[name] = _exact(given[name])
        elif tensor.origin is TensorOrigin.CONSTANT:
            values = graph.constants[name].values
            found[name] = _exact(torch.tensor(values)).reshape(shape)
    return found


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
