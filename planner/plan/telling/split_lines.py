"""Tells the layouts of each class of layers in people's names: what is split, what is converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.axes.infer import Axes
from autopar.planner.layers import Layer, Layers
from autopar.planner.layouts import WHOLE, Kind, Layout, OpLayout, conversion
from autopar.planner.ops import Op
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import layout_words


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLine:
    """One op that is split along an axis, and what comes out."""

    module: str  # within the layer, "" for the layer itself
    op: str
    axis: str
    gives: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionLine:
    """One tensor that is converted before an op of a module needs it."""

    module: str
    tensor: str
    produced: str
    needed: str
    forward: str
    backward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLayouts:
    """The layouts of all layers of one class."""

    name: str
    first: str  # call of its first layer
    layers: int
    ops: int
    splits: tuple[SplitLine, ...]
    conversions: tuple[ConversionLine, ...]


def class_layouts(plan: Plan, axes: Axes, layers: Layers) -> tuple[ClassLayouts, ...]:
    """Return what a plan does inside each class of layers, told of its first layer."""
    produced = _produced(plan, axes, layers)
    return tuple(
        _class(one.name, len(one.layers), layers.layers[one.layers[0]], layouts, produced, axes)
        for one, layouts in zip(layers.classes, plan.layouts, strict=True)
    )


def _class(
    name: str,
    count: int,
    layer: Layer,
    layouts: Sequence[OpLayout],
    produced: Mapping[str, Layout],
    axes: Axes,
) -> ClassLayouts:
    splits = [
        _split_line(op, layout, layer, axes)
        for op, layout in zip(layer.ops, layouts, strict=True)
        if layout.letter
    ]
    return ClassLayouts(
        name=name,
        first=layer.call,
        layers=count,
        ops=len(layer.ops),
        splits=tuple(splits),
        conversions=tuple(_conversions(layer, layouts, produced, axes)),
    )


def _split_line(op: Op, layout: OpLayout, layer: Layer, axes: Axes) -> SplitLine:
    return SplitLine(
        module=_inner(op.call, layer.call),
        op=op_name(op.target),
        axis=axes.names.get(layout.axis, layout.axis),
        gives=", ".join(dict.fromkeys(layout_words(_named(one, axes)) for one in layout.gives)),
    )


def _conversions(
    layer: Layer, layouts: Sequence[OpLayout], produced: Mapping[str, Layout], axes: Axes
) -> Iterator[ConversionLine]:
    """Yield each conversion once, however many ops need its result."""
    seen: set[tuple[str, Layout]] = set()
    for op, layout in zip(layer.ops, layouts, strict=True):
        for tensor, need in zip(op.inputs, layout.needs, strict=True):
            before, after = produced.get(tensor, WHOLE), _named(need, axes)
            made = conversion(before, after)
            if made is None or (tensor, after) in seen:
                continue
            seen.add((tensor, after))
            yield ConversionLine(
                module=_inner(op.call, layer.call),
                tensor=tensor,
                produced=layout_words(before),
                needed=layout_words(after),
                forward=str(made.forward),
                backward=str(made.backward),
            )


def _produced(plan: Plan, axes: Axes, layers: Layers) -> Mapping[str, Layout]:
    """Return the layout of every tensor as its producer leaves it, in people's names.

    The axes of equal layers differ in their leaves but not in their names, so names compare.
    """
    produced = {one.name: _named(one.layout, axes) for one in plan.parameters}
    for layer in layers.layers:
        for op, layout in zip(layer.ops, plan.layouts[layer.layer_class], strict=True):
            given = (_named(one, axes) for one in layout.gives)
            produced.update(zip(op.outputs, given, strict=True))
    return produced


def _named(layout: Layout, axes: Axes) -> Layout:
    if layout.kind is not Kind.SPLIT:
        return layout
    return Layout(layout.kind, axes.names.get(layout.axis, layout.axis), layout.dim)


def _inner(call: str, layer: str) -> str:
    """Return the path of a call within its layer."""
    return call.removeprefix(layer).removeprefix(".") if call.startswith(layer) else call


def op_name(target: str) -> str:
    """Return the plain name of an op: "aten.linear.default" is "linear"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target
