"""From a model file to the best plan of its training: what `autopar plan` and the API share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.codegen.emit import emit_with_notes
from autopar.codegen.script.layer_lists import LostLayersError
from autopar.console import tell_note
from autopar.machine_options import Machines, clusters_of
from autopar.notes.dataset_notes import check_dataset
from autopar.notes.metrics_notes import check_metrics
from autopar.notes.plan_notes import (
    note_devices,
    note_objects_kept,
    note_optimizer,
    note_own_choices,
    note_own_gradients,
    note_plan,
    note_profile,
    note_unpriced,
)
from autopar.notes.row_notes import note_rows
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.findings.half_range import check_constants, check_means
from autopar.planner.findings.optimizer_probe import optimizer_traits
from autopar.planner.graph import Graph
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import Constraints, Objective, without_recompute
from autopar.planner.plan.declared.names import check_names
from autopar.planner.plan.declared.optimizer_limits import with_moments, with_optimizer
from autopar.planner.plan.declared.options import gathered_constraints
from autopar.planner.plan.declared.whole_batch import rows_at_once
from autopar.planner.plan.declared.work import check_tokens, check_work
from autopar.planner.plan.fleet.choosing import Choice, choose
from autopar.planner.plan.fleet.curve import Curve, Fewer
from autopar.planner.plan.fleet.training import Training
from autopar.planner.plan.model_facts import model_facts
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.degrees import BatchFacts, check_degrees, leave_degrees
from autopar.planner.plan.search.demands import check_memory
from autopar.planner.precision import Precision
from autopar.planner.profile.file import read_measurements
from autopar.planner.profile.measured import MeasuredFile
from autopar.planner.trace import trace_for_rows
from autopar.progress import reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plans for all numbers of devices, the chosen one, and whether fewer would do."""

    curve: Curve
    choice: Choice
    fewer: Fewer | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the chosen number of devices."""
        return self.choice.point.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be planned, for which machines, under which constraints."""

    model: str  # path.py or path.py:factory
    arguments: tuple[str, ...]  # "key=value", for functions of the model file
    clusters: tuple[Cluster, ...]  # one of them is chosen where there are several
    constraints: Constraints
    time_limit_seconds: float | None = None
    measured: MeasuredFile | None = None


def request_of(
    model: str,
    *,
    arguments: Sequence[str],
    machines: Machines,
    pins: Sequence[str],
    demands: Mapping[str, str | None],
    constraints: Path | None,
    time_limit_seconds: float | None,
    profile: Path | None,
) -> Request:
    """Return what some options ask for, checked; `demands` are named as in a constraints file."""
    declared = gathered_constraints(pins, demands, constraints)
    check_work(declared)
    clusters = clusters_of(machines)
    measured = read_measurements(profile) if profile else None
    if measured is not None:
        note_profile(measured, clusters[-1], declared.precision)
        clusters = tuple(map(measured.on, clusters))
    return Request(
        model=model,
        arguments=tuple(arguments),
        clusters=clusters,
        constraints=declared,
        time_limit_seconds=time_limit_seconds,
        measured=measured,
    )


def make_plan(
    spec: str,
    arguments: Sequence[str],
    cluster: Cluster,
    constraints: Constraints,
    *,
    time_limit_seconds: float | None = None,
    measured: MeasuredFile | None = None,
) -> Plan:
    """Trace a model and search its best plan on one cluster."""
    request = Request(
        model=spec,
        arguments=tuple(arguments),
        clusters=(cluster,),
        constraints=constraints,
        time_limit_seconds=time_limit_seconds,
        measured=measured,
    )
    return make_plans(request, looks_at_fewer=False).plan


def make_plans(request: Request, *, looks_at_fewer: bool = True) -> Planned:
    """Trace a model once, search its best plan on each cluster, and choose one of them.

    What cannot be is refused as early as it shows.
    """
    # here alone: other commands need no solver
    from autopar.planner.plan.fleet.fewer import fewer_as_fast
    from autopar.planner.plan.fleet.trials import planned_curve
    from autopar.planner.plan.solving.costing import Prices

    clusters, constraints = request.clusters, request.constraints
    _check_degrees(clusters, constraints)
    check_memory(clusters[-1], constraints)
    prices = Prices()
    with reported("tracing the model") as report:
        training = read_training(request, report)
        report("searching")
        curve = planned_curve(
            training,
            clusters,
            time_limit_seconds=request.time_limit_seconds,
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


def scripted(
    request: Request,
    destination: Path,
    *,
    plans: Callable[[Request], Planned] = make_plans,
) -> tuple[Planned, str]:
    """Return the best plan that a script can be written for, and that script.

    Whether a layer is called as a module in the script shows as that is written: one that is not
    cannot run again, and the plan is made anew.
    """
    found = plans(request)
    try:
        text, notes = emit_with_notes(found.plan, destination=destination)
    except LostLayersError as lost:
        why = "its code has to stand in its caller's"
        rest = without_recompute(request.constraints, lost.paths, origin=why)
        if rest is None:
            raise
        tell_note(f"planned again without recomputing {', '.join(lost.paths)}: {why}")
        return scripted(replace(request, constraints=rest), destination, plans=plans)
    for note in notes:
        tell_note(note)
    return found, text


def _check_degrees(
    clusters: Sequence[Cluster], constraints: Constraints, graph: Graph | None = None
) -> None:
    """Refuse constraints that leave no degrees on any of the clusters, as far as is known."""
    batch = BatchFacts.of(graph) if graph is not None else BatchFacts(may_be_uneven=True)
    *fewer, last = (cluster.size for cluster in clusters)
    if not any(leave_degrees(constraints.declared, size, batch) for size in fewer):
        check_degrees(last, constraints, batch)


def read_training(request: Request, report: Callable[[str], None]) -> Training:
    """Return the traced model with what a search needs of it, and tell what a person should know.

    The last cluster is the largest that is planned for.
    """
    clusters, constraints = request.clusters, request.constraints
    model_file = load_model_file(request.model, request.arguments)
    graph = trace_for_rows(model_file, rows_at_once(constraints), constraints.precision)
    optimizer = optimizer_traits(model_file, graph)
    graph, constraints = with_moments(graph, optimizer), with_optimizer(constraints, optimizer)
    report("finding its axes and layers")
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    model = model_facts(model_file, graph, spec=request.model, arguments=request.arguments)
    check_names(constraints, graph, axes, layers=len(layers.layers))
    check_tokens(constraints, tokens_per_row=model.tokens_per_row)
    _check_degrees(clusters, constraints, graph)
    check_dataset(model_file, graph, axes)
    check_metrics(model_file, graph, model)
    note_own_choices(graph)
    note_own_gradients(graph)
    note_optimizer(optimizer)
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
        measured=request.measured,
    )


def _is_rented(cluster: Cluster, constraints: Constraints) -> bool:
    """Whether fewer devices are worth a look: CPUs are where scripts are proved."""
    is_cpu = any(node.device.is_cpu for node in cluster.nodes)
    return not is_cpu and constraints.objective is not Objective.MEMORY
