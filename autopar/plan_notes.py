"""Tells what a person should know of a plan before a machine is rented for it."""

from __future__ import annotations

from autopar.console import tell_note
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.units import bytes_text
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile

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
    rank, memory = plan.fullest
    used, whole = memory.device_bytes, plan.memory_bytes(rank)
    if used > FULL * whole and plan.machines.backend != "gloo":
        tell_note(
            f"the fullest device holds {bytes_text(used)} of its {bytes_text(whole)} by "
            "prediction, which was too low in most runs that were measured (docs/accuracy.md). "
            'Should it not fit, plan with more to spare: --memory "85%".'
        )


def note_profile(measured: MeasuredFile, cluster: Cluster, precision: Precision) -> None:
    """Say where a profile is of other devices, or in another precision, than what is planned."""
    devices = dict.fromkeys(node.device.name for node in cluster.nodes)
    keys = [op.key for op in measured.ops]
    if any(key.device in devices and key.precision is precision for key in keys):
        return
    kinds = sorted({f"{key.device} in {key.precision}" for key in keys})
    tell_note(
        f"the profile has ops on {' and '.join(kinds) or 'no device'}, the plan is for "
        f"{' and '.join(devices)} in {precision}: formulas price its ops. Profile on such a "
        "device, with such a --precision (docs/profile.md)."
    )
