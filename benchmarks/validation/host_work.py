"""Adds the host's work of a framework to the device seconds of a layer.

The host runs ahead of the device, so that a forward or a backward takes the longer of both:

    forward   max(device, ops · o + collectives · c [+ k_f where the layer is computed again])
    backward  max(device, the same with all ops and collectives twice, and k_b)

k is what checkpointing costs the host beside the ops: random states saved and restored, a nested
backward, and the Python of the modules that it runs once more.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.costs.steps.framework import HostWork


def with_host(
    cost: LayerCost, work: HostWork, *, ops: int, collectives: int, recompute: Recompute
) -> LayerCost:
    """Return a layer with the host's work; `collectives` are of its forward."""
    once = ops * work.op_seconds + collectives * work.collective_seconds
    if recompute is Recompute.FULL:
        forward = once + work.checkpoint_forward_seconds
        backward = 2 * once + work.checkpoint_backward_seconds
    else:
        forward = backward = once
    return replace(
        cost,
        forward_seconds=max(cost.forward_seconds, forward),
        backward_seconds=max(cost.backward_seconds, backward),
    )
