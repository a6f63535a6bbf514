"""Prints notes about a plan on stderr."""

from __future__ import annotations

import linecache
from pathlib import Path

from autopar.console import print_note
from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Backend, Cluster
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.prediction import Offload
from autopar.planner.findings import OptimizerTraits
from autopar.planner.findings.loss import counted_by
from autopar.planner.findings.rows import meeting_rows, norm_of_rows
from autopar.planner.findings.writes import objects_given
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import GradientUse
from autopar.planner.inspection import unpriced
from autopar.planner.layers import Layers
from autopar.planner.plan.declared.constraints import (
    DEFAULT_MEMORY,
    Constraints,
    RecomputePin,
    local_steps,
)
from autopar.planner.plan.declared.limits import (
    gradient_words,
    keeps_statistics_apart,
    splits_batch,
)
from autopar.planner.plan.fleet import Fewer, Training
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.comparison import (
    seconds_saved_by_compiling,
    seconds_saved_by_float8,
    seconds_saved_by_fusing,
    unaligned,
)
from autopar.planner.plan.telling.explanation import host_words
from autopar.planner.plan.telling.words import (
    is_nearly,
    meaning_notes,
    named,
    nearly_a_mean,
    parts_apart,
    rows_meet,
    statistics_apart,
)
from autopar.planner.plan.traced import TracedModel
from autopar.planner.precision import Float8, Precision
from autopar.planner.profile.measured import MeasuredFile

# Advice if a split batch would change the loss, by the number of tensors that decide which entries
# the loss averages (0: none, 1: a mask or targets, 2: targets and class weights).
_FIXES = {
    0: "",
    1: "take the mask or the targets from the batch, or ",
    2: "give it class weights that are constants (torch.tensor([…])), or ",
}


def note_traced(traced: TracedModel, training: Training, cluster: Cluster) -> None:
    """Print notes about a model, before the search for its plan."""
    graph = traced.graph
    for note in traced.notes or ():
        print_note(note)
    note_own_choices(graph)
    note_own_gradients(graph)
    note_optimizer(traced.optimizer)
    note_devices(graph, cluster)
    note_rows(graph, training.constraints)
    note_unpriced(graph, training.axes)


def note_found(plan: Plan, training: Training) -> None:
    """Print notes about the plan that was found."""
    note_objects_kept(plan, training.layers)
    note_plan(plan)
    note_unaligned(plan, training.axes)
    note_compiling(plan, training.axes, training.layers)
    note_breaks(plan)
    note_offload(plan)


def note_rows(graph: Graph, constraints: Constraints) -> None:
    """Print notes about the model's rows, before the search."""
    if graph.fixed_batch is not None:
        place = f" at {graph.fixed_at} or in code called there" if graph.fixed_at else ""
        print_note(
            f"the model treats its number of rows as a constant{place}, so it was traced for "
            f"{graph.fixed_batch} rows, and every microbatch has as many. Whether rows depend on "
            "each other is unknown."
        )
    _note_expected(graph)
    met = meeting_rows(graph)
    if met is None:
        _note_statistics(graph, constraints)
    nearly = nearly_a_mean(graph) if met is None else None
    if nearly is not None:
        print_note(
            f"{is_nearly(nearly)}: if the batch is split, each part computes that op for its own "
            "rows, and the loss is the mean over the parts. For the loss of one process, "
            f"{_FIXES[len(counted_by(nearly, graph))]}pin dp=1 and a microbatch of all rows."
        )
    if met is not None and splits_batch(constraints):
        print_note(
            f"{rows_meet(met, graph)}: as pinned, each microbatch of each data rank compares its "
            "own rows only. For the loss of one process, pin neither dp nor microbatch: tensor "
            "ranks may share the rows."
        )
    elif met is not None:
        print_note(
            f"{rows_meet(met, graph)}, so the batch stays whole, in one microbatch of one data "
            "rank. Tensor ranks may share its rows, and exchange what all rows need. To compare "
            "only the rows of each part, pin dp or microbatch."
        )


def _note_expected(graph: Graph) -> None:
    """Print the share of rows that each expert is assumed to get; the routing is unknown."""
    parted = {one.counted_by: one.expected for one in graph.tensors.values() if one.expected != 1.0}
    if not parted:
        return
    shares = sorted({f"{share:.1%}" for share in parted.values()})
    where = next(op.location for op in graph.ops if parted.keys() & set(op.outputs))
    print_note(
        f"{len(parted)} masks divide rows among experts (the first at {where}): each expert is "
        f"priced with an even share of the rows, {' or '.join(shares)}. If an expert gets more, "
        "its layer takes more time and memory than predicted."
    )


def _note_statistics(graph: Graph, constraints: Constraints) -> None:
    """Print why a model with batch norms has one microbatch, unless the user allows several."""
    norm = None if keeps_statistics_apart(constraints) else norm_of_rows(graph)
    if norm is None:
        return
    of = "" if local_steps(constraints) == (1,) else " (with local steps: those of a replica)"
    print_note(
        f"{named(norm)} takes statistics of all rows, so each data rank has one microbatch of all "
        f"of its rows, and data ranks{of} share statistics. For several microbatches, each with "
        "its own statistics, set microbatch_statistics = true in [choices] of a constraints file, "
        "or pin microbatch."
    )


def note_parts_apart(plan: Plan) -> None:
    """Print a note if a script deliberately trains differently from one process."""
    for why in (parts_apart(plan), statistics_apart(plan)):
        if why:
            print_note(why)


def note_plan(plan: Plan) -> None:
    """Print notes on surprising properties of a plan, and on memory above the default limit."""
    for note in meaning_notes(plan):
        if note and note != parts_apart(plan):  # note_rows said so before the search
            print_note(note)
    rank, memory = plan.fullest
    used, whole = memory.device_bytes, plan.memory_bytes(rank)
    usual = DEFAULT_MEMORY.bytes_of(whole)
    if used > usual and not Backend(plan.machines.backend).is_on_cpu:
        print_note(
            f"the fullest device holds {bytes_text(used)} of its {bytes_text(whole)} by "
            f"prediction. Of measured runs, 95% fit if {bytes_text(usual)} or less is predicted "
            "(docs/accuracy.md). If this plan does not fit, leave --memory out."
        )


def note_unpriced(graph: Graph, axes: GraphAxes) -> None:
    """Print a note on each significant op without a formula, whose FLOPs no figure includes."""
    for one in unpriced(graph, axes):
        print_note(
            f"the FLOPs of {one.target} ({one.count} ×, {one.location}) are not known and not "
            f"counted: it is priced by the bytes that it moves, {one.share:.1%} of all bytes of a "
            "step. If it multiplies matrices, the step takes longer than predicted; autopar "
            "profile measures it."
        )


def note_unaligned(plan: Plan, axes: GraphAxes) -> None:
    """Print a note if a size that is no multiple of 8 slows down 16-bit products on a GPU."""
    arrangement = plan.arrangement
    if plan.arrangement.compile.takes_layers:
        return  # torch.compile pads such sizes
    one = unaligned(
        plan.graph,
        axes,
        batch=arrangement.microbatch,
        precision=arrangement.precision,
        device=plan.cluster.nodes[0].device,
    )
    if one is not None:
        print_note(
            f"{one.size:,} is no multiple of 8, so matrix products of that size ({one.location}) "
            f"run at {one.aligned_seconds / one.seconds:.0%} of the speed: they take "
            f"{seconds_text(one.seconds)} of the {seconds_text(one.total_seconds)} that a "
            f"microbatch takes on one device. Padded to {one.padded:,}, they would take "
            f"{seconds_text(one.aligned_seconds)}."
        )


def note_compiling(plan: Plan, axes: GraphAxes, layers: Layers) -> None:
    """Print how much faster a step is with layers compiled, or with products in float8."""
    step, chosen = plan.prediction.step_seconds, plan.arrangement
    if chosen.float8 is not Float8.NONE:
        saved = seconds_saved_by_float8(plan, axes, layers)
        print_note(
            f"linear layers multiply in float8: a step takes {seconds_text(step)} instead of about "
            f"{seconds_text(step + saved)} in {chosen.precision}."
            + ("" if saved > 0 else " Casting their operands takes longer than that saves.")
        )
    if chosen.compile.fuses_messages:
        saved = seconds_saved_by_fusing(plan, axes, layers)
        print_note(
            "messages between tensor ranks are sent while products are computed: a step takes "
            f"{seconds_text(step)} instead of about {seconds_text(step + saved)}. No published GPU "
            "has run this script; autopar verify tells which messages torch.compile fuses."
        )
    is_asked = any(one.place in ("compile", "float8") for one in plan.constraints)
    if is_asked or not chosen.compile.takes_layers:
        return
    saved = seconds_saved_by_compiling(plan, axes, layers)
    print_note(
        f"layers are compiled by torch.compile: a step takes {seconds_text(step)} instead of about "
        f"{seconds_text(step + saved)}. The first step takes longer, because it compiles. "
        "--compile none leaves layers as they are."
    )


def note_breaks(plan: Plan) -> None:
    """Print a note on each line at which torch.compile would stop, so that layers stay eager."""
    if not plan.arrangement.compile.takes_layers:
        return
    stopped: dict[tuple[str, str], list[str]] = {}  # line and reason → layers
    for one in plan.graph.breaks:
        stopped.setdefault((one.where, one.why), []).extend(one.paths)
    for (where, why), (first, *more) in stopped.items():
        layers = f"{first} and {len(more)} like it" if more else first
        file, _, number = where.rpartition(":")
        code = linecache.getline(file, int(number or 0)).strip()
        place = f" ({Path(file).name}, line {number}: {code})" if code else ""
        print_note(
            f"torch.compile cannot compile {layers} as a whole{place}: {why.rstrip('.')}. So the "
            "script leaves them uncompiled, and they are priced so."
        )


def note_offload(plan: Plan) -> None:
    """Print a note if the planner chose to use the host's memory, with its time."""
    saving = sum(mode.is_on_host for mode in plan.layer_modes)
    rules = (one.value for one in plan.constraints if isinstance(one.value, RecomputePin))
    if saving and not any(rule.mode.is_on_host for rule in rules):
        print_note(
            f"{saving} of {len(plan.layer_modes)} layers keep what their backwards need in the "
            "host's memory, because that is faster than computing it again, or because nothing "
            f"else fits; {''.join(host_words(plan))}. A rule in a constraints file chooses other "
            "modes for them."
        )
    is_asked = any(one.field == "offloads" for one in plan.constraints)
    if is_asked or (offload := plan.arrangement.offload) is Offload.NONE:
        return
    name = "optimizer" if offload.has_states else "outer step"
    seconds = next(one.seconds for one in plan.prediction.terms if one.name == name)
    (held,) = host_words(plan)
    print_note(
        f"the {name} runs in the host's memory, because no faster plan without that fits. It takes "
        f"{seconds_text(seconds)} of a step; {held}. The cluster file says how much memory of the "
        "host a device has, and how fast that is. --offload none leaves it on the device."
    )


def note_profile(measured: MeasuredFile, cluster: Cluster, precision: Precision) -> None:
    """Print a note if a profile is of other devices or another precision than the plan's."""
    devices = dict.fromkeys(node.device.name for node in cluster.nodes)
    keys = [op.key for op in measured.ops]
    if any(key.device in devices and key.precision is precision for key in keys):
        return
    kinds = sorted({f"{key.device} in {key.precision}" for key in keys})
    print_note(
        f"the profile has ops on {' and '.join(kinds) or 'no device'}, but the plan is "
        f"for {' and '.join(devices)} in {precision}: formulas price the plan's ops. "
        "Profile on that device, with that --precision (docs/profile.md)."
    )


def note_objects_kept(plan: Plan, layers: Layers) -> None:
    """Print a note if recomputed layers get objects whose memory is not predicted."""
    again = (
        layer
        for layer, mode in zip(layers.layers, plan.layer_modes, strict=True)
        if mode.runs_again
    )
    given = objects_given(again, plan.graph)
    if given:
        print_note(
            f"layers that are recomputed get a {' and a '.join(given)} as an argument. Its tensors "
            "stay in memory until the backward, which predictions do not count: build the model "
            "without it if training does not need it (Hugging Face: use_cache=False)."
        )


def note_devices(graph: Graph, cluster: Cluster) -> None:
    """Print a note if a model would only run on CPUs."""
    if graph.devices_meet_at and not all(node.device.is_cpu for node in cluster.nodes):
        print_note(
            "the model creates a tensor on the CPU and combines it with others at "
            f"{graph.devices_meet_at}, which fails on a GPU: create it on the device of an input, "
            "as in torch.arange(n, device=x.device)."
        )


def note_own_choices(graph: Graph) -> None:
    """Print notes if the model itself recomputes activations or chooses precisions."""
    if graph.autocast_at:
        print_note(
            f"the model chooses a precision of its own, by torch.autocast at {graph.autocast_at}. "
            "The plan does not price that, and forwards printed in scripts do not have it: better "
            "leave it out, and choose with --precision."
        )
    if graph.recomputed_at:
        print_note(
            f"the model itself recomputes activations, by torch.utils.checkpoint at "
            f"{graph.recomputed_at}. The plan counts neither the memory that this saves nor its "
            "time, and chooses layers to recompute on its own: better leave it out (Hugging Face: "
            "gradient_checkpointing_disable())."
        )


def note_own_gradients(graph: Graph) -> None:
    """Print a note if the model computes gradients itself: few plans work, at an unknown cost."""
    taken = (one for one in graph.own_gradients if one.use is GradientUse.TAKEN)
    own = next(taken, None)
    if own is not None:
        print_note(
            f"{gradient_words(own)}. Scripts run this code unchanged, so the model is split over "
            "data ranks only, with ZeRO-1 at most. The FLOPs of that gradient and of the backward "
            "through it are not counted, so a step takes longer than predicted."
        )


def note_optimizer(traits: OptimizerTraits | None) -> None:
    """Print notes on a schedule's end, and on an optimizer's hidden tensors and random draws."""
    if traits is not None and traits.ends is not None:
        print_note(
            f"build_scheduler's schedule fails in step {traits.ends.step} ({traits.ends.said}, at "
            f"{traits.ends.where}): give the script fewer --steps."
        )
    if traits is not None and traits.own_tensors:
        print_note(
            f"{traits.name} keeps tensors outside its state, in {', '.join(traits.own_tensors)}: "
            "checkpoints do not have them, so a resumed training starts with new ones, and no plan "
            "shards them. Keep them in self.state[parameter]."
        )
    if traits is not None and traits.draws:
        print_note(
            f"{traits.name} draws random numbers in its steps: each rank draws those for the "
            "parameters that it updates. The noise is as large as on one device, but has other "
            "values. No two ranks may update copies of a parameter, so plans have ZeRO-1, 2 or 3, "
            "and no tensor ranks."
        )


def note_fewer(plan: Plan, fewer: Fewer) -> None:
    """Print a note that fewer of the devices need no more time."""
    ours, theirs = plan.prediction.step_seconds, fewer.step_seconds
    all_of_them = plan.machines.devices
    how = f"{ours / theirs:.2f} × as fast" if theirs < ours else "as fast within the tolerance"
    print_note(
        f"{fewer.devices} of these {all_of_them} devices need {seconds_text(theirs)} or less for "
        f"the same step, which takes {seconds_text(ours)} on all of them ({how}): "
        f"--gpus 1..{all_of_them} compares them."
    )
