"""`autopar plan`: the best way to split a training, with its proof."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.codegen.emit import FILE_NAME as SCRIPT_NAME
from autopar.codegen.emit import emit, refuse_overwriting, write_text
from autopar.codegen.script.layer_lists import LostLayersError
from autopar.commands import plan_options as options
from autopar.commands.machine_options import clusters_of
from autopar.console import results, tell_note
from autopar.curve_page import curve_json, curve_page, work_text
from autopar.dataset_notes import check_dataset
from autopar.plan_notes import (
    note_devices,
    note_fewer,
    note_objects_kept,
    note_own_choices,
    note_plan,
    note_profile,
    note_unpriced,
)
from autopar.plan_page import plan_page
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.destination import refuse_named_as_file, refuse_replacing
from autopar.planner.findings.half_range import check_constants, check_means
from autopar.planner.findings.optimizer_probe import optimizer_traits
from autopar.planner.graph import Graph
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file, model_path
from autopar.planner.plan.declared.constraints import Constraints, Objective, without_recompute
from autopar.planner.plan.declared.names import check_names
from autopar.planner.plan.declared.optimizer_limits import with_moments, with_optimizer
from autopar.planner.plan.declared.options import gathered_constraints
from autopar.planner.plan.declared.whole_batch import rows_at_once
from autopar.planner.plan.declared.work import check_tokens, check_work
from autopar.planner.plan.files.document import FILE_NAME, refuse_foreign, summary, write_plan
from autopar.planner.plan.fleet.choosing import Choice, choose
from autopar.planner.plan.fleet.curve import Curve, Fewer
from autopar.planner.plan.fleet.training import Training
from autopar.planner.plan.model_facts import model_facts
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.degrees import check_degrees, leave_degrees
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
    samples: options.SAMPLES = None,
    tokens: options.TOKENS = None,
    deadline: options.DEADLINE = None,
    budget: options.BUDGET = None,
    tolerance: options.TOLERANCE = None,
    constraints: options.CONSTRAINTS = None,
    time_limit: options.TIME_LIMIT = None,
    profile: options.PROFILE = None,
    output: options.OUTPUT = Path(),
    force: options.FORCE = False,
    as_json: options.AS_JSON = False,
) -> None:
    """Plan how to split the training of a model, prove the choice, and write the script.

    The script, train.py, runs under torchrun. Without --gpus, --cluster says the machines. Several
    numbers of devices (--gpus 1,2,4,8) are compared, and one is chosen.

    Example: autopar plan models_zoo/gpt2.py --arg size=124m --gpus 8 --global-batch 64 -o out
    """
    demands = {
        "limits.tp": max_tp,
        "limits.pp": max_pp,
        "limits.dp": max_dp,
        "limits.memory": memory,
        "objective": objective,
        "samples": samples,
        "tokens": tokens,
        "deadline": deadline,
        "budget": budget,
        "tolerance": tolerance,
        "global_batch": global_batch,
        "precision": precision,
    }
    declared = gathered_constraints(pin or (), demands, constraints)
    check_work(declared)
    clusters = clusters_of(gpus, device, nodes, cluster)
    measured = read_measurements(profile) if profile else None
    if measured is not None:
        note_profile(measured, clusters[-1], declared.precision)
        clusters = tuple(map(measured.on, clusters))
    refuse_named_as_file(output)
    refuse_foreign(output / FILE_NAME)
    refuse_replacing(output / SCRIPT_NAME, model_path(model))
    if not force:
        refuse_overwriting(output / SCRIPT_NAME)
    made: list[Planned] = []

    def plan_with(constraints: Constraints) -> Plan:
        made.append(
            make_plans(
                model,
                arg or (),
                clusters,
                constraints,
                time_limit_seconds=time_limit,
                measured=measured,
            )
        )
        return made[-1].choice.point.plan

    found, text = scripted_plan(plan_with, declared, output / SCRIPT_NAME)
    write_plan(found, output / FILE_NAME)
    # Both files are there before the page, which may not be read to its end.
    script = write_text(text, output, force=force)
    tell(made[-1], as_json=as_json)
    if not as_json:
        results().print(f"Written: {output / FILE_NAME}, {script}", soft_wrap=True)


def tell(planned: Planned, *, as_json: bool) -> None:
    """Print the plan, behind the numbers of devices it was chosen among where these are several."""
    curve, point = planned.curve, planned.choice.point
    is_compared = len(curve.trials) > 1
    if as_json:
        counts = {"counts": curve_json(curve)} if is_compared else {}
        print(json.dumps({**summary(point.plan), **counts}, indent=2))
        return
    for part in curve_page(curve, planned.choice) if is_compared else ():
        results().print(part)
    for part in plan_page(point.plan):
        results().print(part)
    if work := work_text(point):
        results().print(work, soft_wrap=True)
    if planned.fewer is not None:
        note_fewer(point.plan, planned.fewer)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plans for all numbers of devices, the chosen one, and whether fewer would do."""

    curve: Curve
    choice: Choice
    fewer: Fewer | None = None


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
    planned = make_plans(
        spec,
        arguments,
        (cluster,),
        constraints,
        time_limit_seconds=time_limit_seconds,
        measured=measured,
        looks_at_fewer=False,
    )
    return planned.choice.point.plan


def make_plans(
    spec: str,
    arguments: Sequence[str],
    clusters: Sequence[Cluster],
    constraints: Constraints,
    *,
    time_limit_seconds: float | None,
    measured: Measurements | None = None,
    looks_at_fewer: bool = True,
) -> Planned:
    """Trace a model once, search its best plan on each cluster, and choose one of them."""
    # here alone: other commands need no solver
    from autopar.planner.plan.fleet.fewer import fewer_as_fast
    from autopar.planner.plan.fleet.trials import planned_curve
    from autopar.planner.plan.solving.costing import Prices

    _check_degrees(clusters, constraints)
    check_memory(clusters[-1], constraints)
    prices = Prices()
    with reported("tracing the model") as report:
        training = read_training(spec, arguments, clusters, constraints, measured, report)
        report("searching")
        curve = planned_curve(
            training,
            clusters,
            time_limit_seconds=time_limit_seconds,
            report=report,
            prices=prices,
        )
        choice = choose(curve, constraints)
        found = choice.point.plan
        fewer = None
        if looks_at_fewer and len(clusters) == 1 and _is_rented(clusters[0], constraints):
            report("looking at fewer devices")
            fewer = fewer_as_fast(training, clusters[0], found, prices=prices)
    if constraints.precision is Precision.FP16:
        check_means(training.graph, microbatch=found.arrangement.microbatch)
    note_objects_kept(found, training.layers)
    note_plan(found)
    return Planned(curve=curve, choice=choice, fewer=fewer)


def _check_degrees(
    clusters: Sequence[Cluster], constraints: Constraints, graph: Graph | None = None
) -> None:
    """Refuse constraints that leave no degrees on any of the clusters, as far as is known."""
    fixed, at = (graph.fixed_batch, graph.fixed_at) if graph else (None, "")
    *fewer, last = (cluster.size for cluster in clusters)
    if not any(leave_degrees(constraints.declared, size, fixed_batch=fixed) for size in fewer):
        check_degrees(last, constraints, fixed_batch=fixed, fixed_at=at)


def read_training(
    spec: str,
    arguments: Sequence[str],
    clusters: Sequence[Cluster],
    constraints: Constraints,
    measured: Measurements | None,
    report: Callable[[str], None],
) -> Training:
    """Return the traced model with what a search needs of it, and tell what a person should know.

    The last cluster is the largest that is planned for.
    """
    model_file = load_model_file(spec, arguments)
    graph = trace_for_rows(model_file, rows_at_once(constraints), constraints.precision)
    optimizer = optimizer_traits(model_file, graph)
    graph, constraints = with_moments(graph, optimizer), with_optimizer(constraints, optimizer)
    report("finding its axes and layers")
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    model = model_facts(model_file, graph, spec=spec, arguments=arguments)
    check_names(constraints, graph, axes, layers=len(layers.layers))
    check_tokens(constraints, tokens_per_row=model.tokens_per_row)
    _check_degrees(clusters, constraints, graph)
    check_dataset(model_file, graph, axes)
    note_own_choices(graph)
    note_devices(graph, clusters[-1])
    note_rows(graph, constraints)
    note_unpriced(graph, axes)
    if constraints.precision is Precision.FP16:
        check_constants(graph)
    return Training(
        graph=graph,
        axes=axes,
        layers=layers,
        model=model,
        constraints=constraints,
        measured=measured,
    )


def _is_rented(cluster: Cluster, constraints: Constraints) -> bool:
    """Whether fewer devices are worth a look: CPUs are where scripts are proved."""
    is_cpu = any(node.device.is_cpu for node in cluster.nodes)
    return not is_cpu and constraints.objective is not Objective.MEMORY
