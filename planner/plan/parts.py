"""Finds the axes and layers of a plan's graph again, and checks that its layouts fit them."""

from __future__ import annotations

from autopar.planner.axes.infer import Axes, infer_axes
from autopar.planner.errors import gathered
from autopar.planner.layers import Layers, find_layers
from autopar.planner.plan.files.consistency import layout_faults
from autopar.planner.plan.plan import Plan


def parts_of(plan: Plan, *, where: str) -> tuple[Axes, Layers]:
    """Return axes and layers; raise an error that tells all that does not fit.

    `where` names the plan's file in messages.
    """
    axes = infer_axes(plan.graph)
    layers = find_layers(plan.graph, axes)
    faults = list(layout_faults(plan, axes, layers))
    if faults:
        raise gathered(faults, where=where, fix="plan again with `autopar plan`")
    return axes, layers
