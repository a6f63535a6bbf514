"""Finds what of a layer runs again in its backward under each recompute mode."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.costs.layer_flow import Conversion, LayerFlow, PlacedOp
from autopar.planner.costs.prediction import Recompute
from autopar.planner.layouts import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The ops and conversions whose forward runs a second time."""

    ops: tuple[PlacedOp, ...] = ()
    conversions: tuple[Conversion, ...] = ()


def run_again(flow: LayerFlow, mode: Recompute) -> Again:
    """Return what runs again: nothing, what is cheap and needed, or the whole layer.

    Full recompute runs the layer to its end, as most frameworks do; PyTorch stops at the last
    tensor that is needed, which spares the last product.
    """
    if mode is Recompute.NONE:
        return Again()
    if mode is Recompute.FULL:
        return Again(ops=flow.ops, conversions=flow.conversions)
    return _cheap(flow)


def _cheap(flow: LayerFlow) -> Again:
    """Walk back from what the backward needs to what was kept: results of contractions, inputs."""
    needed: set[tuple[str, Layout]] = set()
    for one in flow.ops:
        needed |= {(name, one.layout_of(name)) for name in one.kept.seen}
    names = {name for name, _ in needed}
    again: list[PlacedOp] = []
    for one in reversed(flow.ops):
        if one.is_contraction or not (one.kept.made or names.intersection(one.op.outputs)):
            continue
        again.append(one)
        needed |= set(zip(one.op.inputs, one.layout.needs, strict=True))
        names.update(one.op.inputs)
    return Again(
        ops=tuple(reversed(again)),
        conversions=tuple(c for c in flow.conversions if (c.tensor, c.needed) in needed),
    )
