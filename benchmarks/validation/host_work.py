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

from dataclasses import dataclass, fields, replace

from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.costs.steps.framework import FrameworkConstants, read_framework_constants


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """Host times of the large frameworks of published runs, fitted by benchmarks/fit_framework.py.

    Those of plain PyTorch are in planner/costs/ops/host.toml.
    """

    op_seconds: float = 7e-6  # to dispatch an op
    # to run a collective of the tensor axis: autograd's function, the process group
    collective_seconds: float = 65e-6
    # of a layer that will be computed again: random states, the modules' Python
    checkpoint_forward_seconds: float = 1e-3
    # of the same in the backward: states restored, a nested backward
    checkpoint_backward_seconds: float = 1.6e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConstants(FrameworkConstants):
    """The constants that autopar ships, and the host's work in published runs."""

    host: HostWork


def published_constants() -> PublishedConstants:
    """Return the constants for published runs."""
    shipped = read_framework_constants()
    own = {one.name: getattr(shipped, one.name) for one in fields(shipped)}
    return PublishedConstants(**own, host=HostWork())


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
