"""Tells what a person should know of a plan before a machine is rented for it."""

from __future__ import annotations

from autopar.console import tell_note
from autopar.planner.axes.infer import Axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.units import bytes_text
from autopar.planner.findings.unpriced import unpriced
from autopar.planner.graph import Graph
from autopar.planner.plan.declared.constraints import USUAL_MEMORY
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.meaning import shares_nothing, statistics_apart
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile


def note_plan(plan: Plan) -> None:
    """Say what the plan means where that may surprise, and where memory leaves no room."""
    for note in (statistics_apart(plan), shares_nothing(plan)):
        if note:
            tell_note(note)
    used, whole = plan.prediction.peak_memory.device_bytes, plan.machines.memory_bytes
    usual = USUAL_MEMORY.bytes_of(whole)
    if used > usual and plan.machines.backend != "gloo":
        tell_note(
            f"the fullest device holds {bytes_text(used)} of its {bytes_text(whole)} by "
            f"prediction. Up to {bytes_text(usual)}, 95% of the runs that were measured would have "
            "fit (docs/accuracy.md). Should it not fit, leave --memory out."
        )


def note_unpriced(graph: Graph, axes: Axes) -> None:
    """Name the ops that weigh and have no formula: their FLOPs are in no figure of the plan."""
    for one in unpriced(graph, axes):
        tell_note(
            f"what {one.target} computes ({one.count} ×, {one.location}) is not known, so its "
            f"FLOPs count nowhere: it is priced by the bytes that it moves, {one.share:.1%} of all "
            "that a step moves. If it multiplies matrices, the step takes longer than predicted; "
            "autopar profile measures it."
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
