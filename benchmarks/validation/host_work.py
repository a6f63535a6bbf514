"""Adds a framework's work on the host to the device seconds of a layer.

The host runs ahead of the device, so a forward or a backward takes the longer of both times:

    forward, backward   max(device, ops · o + collectives · c)

With full recomputation:

    forward             max(device, ops · o + collectives · c + k_f)
    backward            max(device, 2 · (ops · o + collectives · c) + k_b)

k_f and k_b are what checkpointing costs the host beside the ops: random states saved and restored,
a nested backward, and the Python code of the modules that run once more.
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
