"""Turns what layers cost on unlike devices into what they cost a group that waits for all of them.

Each layer's forward, its whole backward and the part that makes the inputs' gradients are those of
the slowest device. What is kept of a microbatch is that of the device that keeps most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.planner.costs.prediction import LayerCost, Modes

_GREATEST = (
    *("forward_seconds", "recompute_seconds", "saved_bytes", "transient_bytes", "output_bytes"),
    *("learning_bytes", "learned_gradient_bytes", "deferred_bytes"),
)


def slowest(rows: Sequence[tuple[Modes, ...]]) -> tuple[Modes, ...]:
    """Return each layer at its slowest on any kind of device; equal layers stay one object."""
    if len(rows) == 1:
        return rows[0]
    known: dict[tuple[int, ...], Modes] = {}
    row = []
    for alternatives in zip(*rows, strict=True):
        key = tuple(map(id, alternatives))
        if key not in known:
            known[key] = {
                mode: _slowest([modes[mode] for modes in alternatives]) for mode in alternatives[0]
            }
        row.append(known[key])
    return tuple(row)


def _slowest(costs: Sequence[LayerCost]) -> LayerCost:
    """Return the cost that none of some costs exceeds; parts are those of the slowest of all."""
    most = max(costs, key=lambda one: one.forward_seconds + one.backward_seconds)
    backward = max(one.backward_seconds for one in costs)
    inputs = max(one.backward_seconds - one.weight_gradient_seconds for one in costs)
    return replace(
        most,
        backward_seconds=backward,
        weight_gradient_seconds=backward - inputs,
        **{name: max(getattr(one, name) for one in costs) for name in _GREATEST},
    )
