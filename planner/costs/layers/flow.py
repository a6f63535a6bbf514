"""Lays the layouts of one layer over its ops: what each op costs, what is converted, by whom used.

All recompute modes read the same flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.conversions import ConversionCost
from autopar.planner.costs.ops.kept import Kept, is_one_kernel
from autopar.planner.costs.ops.pricer import OpCost, Pricer
from autopar.planner.costs.ops.shapes import OpSplit
from autopar.planner.layers import Layer
from autopar.planner.layouts import WHOLE, Layout, OpLayout
from autopar.planner.ops import Op, Origin
from autopar.planner.rules.table import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """One op in its layout."""

    op: Op
    layout: OpLayout
    split: OpSplit | None
    cost: OpCost
    inside_seconds: float  # of collectives that are part of its forward
    kept: Kept
    is_differentiable: bool
    is_contraction: bool  # a matrix product, a convolution, an attention in one kernel

    def layout_of(self, tensor: str) -> Layout:
        """Return the layout in which the op has one of its operands or results."""
        if tensor in self.op.outputs:
            return self.layout.gives[self.op.outputs.index(tensor)]
        return self.layout.needs[self.op.inputs.index(tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A tensor that the layer converts, once for all ops that need this layout of it."""

    tensor: str
    needed: Layout
    cost: ConversionCost


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlow:
    """One layer in its layouts; `produced` is the layout of each tensor before conversions."""

    pricer: Pricer
    position: int
    ops: tuple[PlacedOp, ...]
    produced: Mapping[str, Layout]
    conversions: tuple[Conversion, ...]
    degree: int

    def made_here(self, tensor: str) -> bool:
        """Whether an op of this layer makes a tensor."""
        return self.pricer.residence.maker.get(tensor) == self.position

    def takes_over(self, root: str) -> bool:
        """Whether this layer counts the memory of a tensor that it did not make.

        It is the only later layer that uses it; an input of the model is counted by its first.
        """
        users = self.pricer.later_users.get(root, frozenset())
        origin = self.pricer.graph.tensors[root].origin
        if origin is Origin.INPUT:
            return min(users, default=-1) == self.position
        return origin is Origin.OP and users == {self.position}


def layer_flow(
    pricer: Pricer,
    layer: Layer,
    layouts: Sequence[OpLayout],
    *,
    degree: int,
    shape: GroupShape,
    parameters: Mapping[str, Layout],
    outside: Mapping[str, Layout],
) -> LayerFlow:
    """Return the ops of a layer in their layouts, and the conversions that these ask for.

    `outside` holds the layouts in which tensors pass from one layer to others: what this layer
    makes of them it converts itself, the others it finds so.
    """
    placed = tuple(
        _placed(pricer, op, layout, degree=degree, shape=shape)
        for op, layout in zip(layer.ops, layouts, strict=True)
    )
    produced: dict[str, Layout] = {}
    for one in placed:
        for name in one.op.inputs:
            produced.setdefault(name, parameters.get(name, outside.get(name, WHOLE)))
        produced.update(zip(one.op.outputs, one.layout.gives, strict=True))
    conversions = tuple(
        Conversion(
            tensor=tensor,
            needed=needed,
            cost=pricer.conversion(tensor, produced[tensor], needed, degree=degree, shape=shape),
        )
        for tensor, needed in dict.fromkeys((*_uses(placed), *_handed_on(placed, outside)))
        if degree > 1 and needed != produced[tensor]
    )
    return LayerFlow(
        pricer=pricer,
        position=pricer.residence.home[layer.ops[0].name],
        ops=placed,
        produced=produced,
        conversions=conversions,
        degree=degree,
    )


def _placed(
    pricer: Pricer, op: Op, layout: OpLayout, *, degree: int, shape: GroupShape
) -> PlacedOp:
    split = None
    if layout.letter and degree > 1:
        split = OpSplit(letter=layout.letter, axis=layout.axis, degree=degree)
    return PlacedOp(
        op=op,
        layout=layout,
        split=split,
        cost=pricer.cost(op, split),
        inside_seconds=pricer.inside_seconds(op, split, shape),
        kept=pricer.kept(op),
        is_differentiable=pricer.graph.learns(op),
        is_contraction=bool(rule_of(op.target).contracts) and is_one_kernel(op, pricer.kernels),
    )


def _handed_on(
    placed: tuple[PlacedOp, ...], outside: Mapping[str, Layout]
) -> Iterator[tuple[str, Layout]]:
    for one in placed:
        yield from ((name, outside[name]) for name in one.op.outputs if name in outside)


def _uses(placed: tuple[PlacedOp, ...]) -> Iterator[tuple[str, Layout]]:
    for one in placed:
        yield from zip(one.op.inputs, one.layout.needs, strict=True)
