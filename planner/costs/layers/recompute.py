"""Finds what of a layer runs again in its backward under each recompute mode."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autopar.planner.costs.layers.flow import Conversion, LayerFlow, PlacedOp
from autopar.planner.costs.prediction import Recompute
from autopar.planner.layouts import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The ops and conversions whose forward runs a second time."""

    ops: tuple[PlacedOp, ...] = ()
    conversions: tuple[Conversion, ...] = ()


def run_again(flow: LayerFlow, mode: Recompute) -> Again:
    """Return what runs again: nothing, what is cheap and needed, or all that is called again."""
    if mode is Recompute.NONE:
        return Again()
    if mode is Recompute.FULL:
        return called_again(flow)
    return _cheap(flow)


def called_again(flow: LayerFlow) -> Again:
    """Return what is called once more: PyTorch stops at the last tensor that the backward needs.

    An op keeps its operands before it runs, so the last product is spared, and what joins its
    parts. Other frameworks run a layer to its end.
    """
    if not flow.pricer.stops_early:
        return Again(ops=flow.ops, conversions=flow.conversions)
    keeping = [place for place, one in enumerate(flow.ops) if one.kept.seen or one.kept.made]
    if not keeping:
        return Again()
    last = flow.ops[keeping[-1]]
    keeps_result = last.kept.made or any(name in last.op.outputs for name in last.kept.seen)
    needed = {
        pair
        for one in flow.ops[: keeping[-1] + 1]
        for pair in zip(one.op.inputs, one.layout.needs, strict=True)
    }
    return Again(
        ops=flow.ops[: keeping[-1] + bool(keeps_result)],
        conversions=_of(flow, needed),
    )


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
    return Again(ops=tuple(reversed(again)), conversions=_of(flow, needed))


def _of(flow: LayerFlow, needed: Collection[tuple[str, Layout]]) -> tuple[Conversion, ...]:
    return tuple(c for c in flow.conversions if (c.tensor, c.needed) in needed)
