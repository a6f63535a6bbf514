"""`autopar plan`: the best way to split a training, with its proof."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.codegen.emit import FILE_NAME as SCRIPT_NAME
from autopar.codegen.emit import emit, refuse_overwriting, write_text
from autopar.codegen.script.layer_lists import LostLayersError
from autopar.commands import plan_options as options
from autopar.console import results, tell_note
from autopar.plan_notes import note_plan, note_profile, note_unpriced
from autopar.plan_page import plan_page
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.costs.prediction import Recompute
from autopar.planner.destination import refuse_named_as_file, refuse_replacing
from autopar.planner.findings.half_range import check_constants, check_means
from autopar.planner.findings.optimizer_probe import optimizer_traits
from autopar.planner.findings.recomputable import objects_given
from autopar.planner.graph import Graph
from autopar.planner.layers import Layers, find_layers
from autopar.planner.model.model_file import load_model_file, model_path
from autopar.planner.plan.declared.constraints import Constraints, without_recompute
from autopar.planner.plan.declared.names import check_names
from autopar.planner.plan.declared.optimizer_limits import with_moments, with_optimizer
from autopar.planner.plan.declared.options import gathered_constraints
from autopar.planner.plan.declared.whole_batch import rows_at_once
from autopar.planner.plan.files.document import FILE_NAME, refuse_foreign, summary, write_plan
from autopar.planner.plan.model_facts import model_facts
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.degrees import check_degrees
from autopar.planner.plan.search.demands import check_memory
from autopar.planner.precision import Precision
from autopar.planner.profile.file import read_measurements
from autopar.planner.trace import trace_for_rows
from autopar.progress import reported
from autopar.row_notes import note_rows


def plan(
    model: options.MODEL,
    gpus: options.GPUS = None,
    device: options.DEVICE = None,
    nodes: options.NODES = None,
    cluster: options.CLUSTER = None,
    arg: options.ARG = None,
    global_batch: options.GLOBAL_BATCH = None,
    precision: options.PRECISION = None,
    pin: options.PIN = None,
    max_tp: options.MAX_TP = None,
    max_pp: options.MAX_PP = None,
    max_dp: options.MAX_DP = None,
    memory: options.MEMORY = None,
    objective: options.OBJECTIVE = None,
    constraints: options.CONSTRAINTS = None,
    time_limit: options.TIME_LIMIT = None,
    profile: options.PROFILE = None,
    output: options.OUTPUT = Path(),
    force: options.FORCE = False,
    as_json: options.AS_JSON = False,
) -> None:
    """Plan how to split the training of a model, prove the choice, and write the script.

    The script, train.py, runs under torchrun. Without --gpus, --cluster says the machines.

    Example: autopar plan models_zoo/gpt2.py --arg size=124m --gpus 8 --global-batch 64 -o out
    """
    demands = {
        "limits.tp": max_tp,
        "limits.pp": max_pp,
        "limits.dp": max_dp,
        "limits.memory": memory,
        "objective": objective,
        "global_batch": global_batch,
        "precision": precision,
    }
    declared = gathered_constraints(pin or (), demands, constraints)
    machines = options.cluster_of(gpus, device, nodes, cluster)
    measured = read_measurements(profile) if profile else None
    if measured is not None:
        note_profile(measured, machines, declared.precision)
    refuse_named_as_file(output)
    refuse_foreign(output / FILE_NAME)
    refuse_replacing(output / SCRIPT_NAME, model_path(model))
    if not force:
        refuse_overwriting(output / SCRIPT_NAME)

    def plan_with(constraints: Constraints) -> Plan:
        return make_plan(
            model,
            arg or (),
            measured.on(machines) if measured else machines,
            constraints,
            time_limit_seconds=time_limit,
            measured=measured,
        )

    found, text = scripted_plan(plan_with, declared, output / SCRIPT_NAME)
    write_plan(found, output / FILE_NAME)
    # Both files are there before the page, which may not be read to its end.
    script = write_text(text, output, force=force)
    if as_json:
        print(json.dumps(summary(found), indent=2))
        return
    for part in plan_page(found):
        results().print(part)
    results().print(f"Written: {output / FILE_NAME}, {script}", markup=False, soft_wrap=True)


def scripted_plan(
    plan_with: Callable[[Constraints], Plan], constraints: Constraints, destination: Path
) -> tuple[Plan, str]:
    """Return the best plan that a script can be written for, and that script.

    Whether a layer is called as a module in the script shows as that is written: one that is not
    cannot run again, and the plan is made anew.
    """
    found = plan_with(constraints)
    try:
        return found, emit(found, destination=destination)
    except LostLayersError as lost:
        why = "its code has to stand in its caller's"
        rest = without_recompute(constraints, lost.paths, origin=why)
        if rest is None:
            raise
        tell_note(f"planned again without recomputing {', '.join(lost.paths)}: {why}")
    return scripted_plan(plan_with, rest, destination)


def make_plan(
    spec: str,
    arguments: Sequence[str],
    cluster: Cluster,
    constraints: Constraints,
    *,
    time_limit_seconds: float | None,
    measured: Measurements | None = None,
) -> Plan:
    """Trace a model and search its best plan; what cannot be is refused as early as it shows."""
    from autopar.planner.plan.search.search import (
        search,  # here alone: other commands need no solver
    )

    check_degrees(cluster.size, constraints)
    check_memory(cluster, constraints)
    model_file = load_model_file(spec, arguments)
    with reported("tracing the model") as report:
        graph = trace_for_rows(model_file, rows_at_once(constraints), constraints.precision)
        optimizer = optimizer_traits(model_file, graph)
        graph, constraints = with_moments(graph, optimizer), with_optimizer(constraints, optimizer)
        report("finding its axes and layers")
        axes = infer_axes(graph)
        layers = find_layers(graph, axes)
        fixed, fixed_at = graph.fixed_batch, graph.fixed_at
        check_degrees(cluster.size, constraints, fixed_batch=fixed, fixed_at=fixed_at)
        check_names(constraints, graph, axes, layers=len(layers.layers))
        _note_own_choices(graph)
        _note_devices(graph, cluster)
        note_rows(graph, constraints)
        note_unpriced(graph, axes)
        if constraints.precision is Precision.FP16:
            check_constants(graph)
        report("searching")
        found = search(
            graph,
            axes,
            layers,
            model_facts(model_file, graph, spec=spec, arguments=arguments),
            cluster,
            constraints,
            time_limit_seconds=time_limit_seconds,
            report=report,
            measured=measured,
        )
    if constraints.precision is Precision.FP16:
        check_means(graph, microbatch=found.arrangement.microbatch)
    _note_objects_kept(found, layers)
    note_plan(found)
    return found


def _note_objects_kept(plan: Plan, layers: Layers) -> None:
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


def _note_devices(graph: Graph, cluster: Cluster) -> None:
    """Say where a model that runs on CPUs alone would fail on other devices."""
    if graph.devices_meet_at and not all(node.device.is_cpu for node in cluster.nodes):
        tell_note(
            f"the model creates a tensor on the CPU that others meet at {graph.devices_meet_at}, "
            "which fails on a GPU: create it on the device of an input, as in "
            "torch.arange(n, device=x.device)."
        )


def _note_own_choices(graph: Graph) -> None:
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
