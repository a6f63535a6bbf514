"""Tells what a person should know of a plan before a machine is rented for it."""

from __future__ import annotations

from autopar.console import tell_note
from autopar.planner.axes.infer import Axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.units import bytes_text, seconds_text
from autopar.planner.costs.prediction import Recompute
from autopar.planner.findings.optimizer_probe import OptimizerTraits
from autopar.planner.findings.recomputable import objects_given
from autopar.planner.findings.unpriced import unpriced
from autopar.planner.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.ops import GradientUse
from autopar.planner.plan.declared.constraints import USUAL_MEMORY
from autopar.planner.plan.declared.gradient_limits import gradient_words
from autopar.planner.plan.fleet.curve import Fewer
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.meaning import meaning_notes, parts_apart
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile


def note_plan(plan: Plan) -> None:
    """Say what the plan means where that may surprise, and where memory leaves no room."""
    for note in meaning_notes(plan):
        if note and note != parts_apart(plan):  # which is told before the search
            tell_note(note)
    rank, memory = plan.fullest
    used, whole = memory.device_bytes, plan.memory_bytes(rank)
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


def note_objects_kept(plan: Plan, layers: Layers) -> None:
    """Say that layers which run again are given objects, whose contents no prediction counts."""
    again = (
        layer
        for layer, mode in zip(layers.layers, plan.layer_modes, strict=True)
        if mode is not Recompute.NONE
    )
    given = objects_given(again, plan.graph)
    if given:
        tell_note(
            f"layers that are recomputed are given a {' and a '.join(given)}. What it holds stays "
            "in memory until the backward, and no prediction counts it: build the model without "
            "it where training does not need it (Hugging Face: use_cache=False)."
        )


def note_devices(graph: Graph, cluster: Cluster) -> None:
    """Say where a model that runs on CPUs alone would fail on other devices."""
    if graph.devices_meet_at and not all(node.device.is_cpu for node in cluster.nodes):
        tell_note(
            f"the model creates a tensor on the CPU that others meet at {graph.devices_meet_at}, "
            "which fails on a GPU: create it on the device of an input, as in "
            "torch.arange(n, device=x.device)."
        )


def note_own_choices(graph: Graph) -> None:
    """Say that a model chooses what a plan chooses: what to compute again, and how precisely."""
    if graph.autocast_at:
        tell_note(
            f"the model chooses a precision of its own, by torch.autocast at {graph.autocast_at}. "
            "The plan neither prices that nor has it in code that it prints: better leave it out, "
            "and choose with --precision."
        )
    if graph.recomputed_at:
        tell_note(
            f"the model computes activations again by itself, by torch.utils.checkpoint at "
            f"{graph.recomputed_at}. The plan counts neither what that saves nor what it takes, "
            "and chooses layers of its own to compute again: better leave it out (Hugging Face: "
            "gradient_checkpointing_disable())."
        )


def note_own_gradients(graph: Graph) -> None:
    """Say that a model takes gradients by itself, which rules plans out and is not priced."""
    taken = (one for one in graph.own_gradients if one.use is GradientUse.TAKEN)
    own = next(taken, None)
    if own is not None:
        tell_note(
            f"{gradient_words(own)}. Scripts run its code as it is: it is split over data ranks "
            "alone, with ZeRO-1 at most. What that gradient and the backward through it compute is "
            "not counted, so a step takes longer than predicted."
        )


def note_optimizer(traits: OptimizerTraits | None) -> None:
    """Say that an optimizer draws its own numbers on each rank, and where its schedule ends."""
    if traits is not None and traits.ends is not None:
        tell_note(
            f"build_scheduler's schedule fails in step {traits.ends.step} ({traits.ends.said}, at "
            f"{traits.ends.where}): a script takes fewer steps by --steps alone."
        )
    if traits is not None and traits.draws:
        tell_note(
            f"{traits.name} draws random numbers in its steps: each rank draws those of what it "
            "steps. The noise is as large as on one device, but its numbers are others. So no data "
            "rank steps a copy of another's parameters: ZeRO-1, 2 or 3, and no tensor ranks."
        )


def note_fewer(plan: Plan, fewer: Fewer) -> None:
    """Say that fewer of the devices are as fast."""
    ours, theirs = plan.prediction.step_seconds, fewer.step_seconds
    all_of_them = plan.machines.devices
    how = f"{ours / theirs:.2f} × as fast" if theirs < ours else "as fast within the tolerance"
    tell_note(
        f"{fewer.devices} of these {all_of_them} devices need {seconds_text(theirs)} or less for "
        f"the same step, which takes {seconds_text(ours)} on all of them ({how}): "
        f"--gpus 1..{all_of_them} compares them."
    )
