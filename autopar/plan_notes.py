"""Tells what a person should know of a plan before a machine is rented for it."""

from __future__ import annotations

from autopar.console import tell_note
from autopar.planner.cluster.units import bytes_text
from autopar.planner.plan.plan import Plan

FULL = 0.92  # of a device: predictions of memory are less sure than the rest is large


def note_plan(plan: Plan) -> None:
    """Say where tensor ranks share nothing, and where memory leaves no room for an error."""
    splits = any(layout.axis for layouts in plan.layouts for layout in layouts)
    if plan.arrangement.tensor > 1 and not splits:
        tell_note(
            f"as pinned, {plan.arrangement.tensor} tensor ranks compute all of it each: whatever "
            "they might share would take longer. Use fewer devices, pin dp, or require a split "
            "([[splits]] in a constraints file)."
        )
    used, whole = plan.prediction.peak_memory.device_bytes, plan.machines.memory_bytes
    if used > FULL * whole and plan.machines.backend != "gloo":
        tell_note(
            f"the fullest device holds {bytes_text(used)} of its {bytes_text(whole)} by "
            "prediction, which was too low in most runs that were measured (docs/accuracy.md). "
            'Should it not fit, plan with more to spare: --memory "85%".'
        )
