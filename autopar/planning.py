"""From a model file and options to a plan, its script, and the proof of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.codegen.emit import emit_with_notes
from autopar.codegen.proof.comparison import TrainingComparison
from autopar.codegen.proof.verification import check_fits, read_script_of, step_flops, verify
from autopar.codegen.script.layer_lists import LostLayersError
from autopar.codegen.subject import check_unchanged, model_spec
from autopar.console import progress, reported, tell_note
from autopar.dataset_notes import check_dataset, check_metrics
from autopar.notes import (
    note_devices,
    note_objects_kept,
    note_optimizer,
    note_own_choices,
    note_own_gradients,
    note_plan,
    note_profile,
    note_rows,
    note_unaligned,
    note_unpriced,
)
from autopar.options import MachineOptions, clusters_of
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.errors import AutoparError, InfeasibleError, InputError
from autopar.planner.findings.numbers import check_constants, check_means
from autopar.planner.findings.optimizer import optimizer_traits
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file, model_path
from autopar.planner.plan.again import arrangement_constraints, whole_constraints
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Objective,
    check_names,
    check_tokens,
    check_work,
    without_recompute,
)
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.declared.limits import rows_at_once, with_moments, with_optimizer
from autopar.planner.plan.fleet import ChosenPoint, Curve, Fewer, Training, choose
from autopar.planner.plan.plan import Plan, model_facts
from autopar.planner.plan.search.demands import check_memory
from autopar.planner.plan.search.space import BatchFacts, check_degrees, leave_degrees
from autopar.planner.plan.telling.explanation import class_layouts
from autopar.planner.plan.telling.words import arrangement_words, parts_apart, statistics_apart
from autopar.planner.profile.measured import MeasuredFile, read_measurements
from autopar.planner.trace import trace_for_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """The plan of a smaller model, and splits of the larger one that it lacks."""

    plan: Plan
    unlike: tuple[str, ...]


def smaller_plan(plan: Plan, folder: Path, arguments: Sequence[str]) -> Smaller:
    """Return a plan with the same degrees, for the model with other arguments.

    Modules are split and recomputed as in the given plan where sizes allow it.
    """
    spec = model_spec(plan, folder)
    check_unchanged(plan, model_path(spec))
    given = (argument.partition("=") for argument in arguments)
    chosen = dict(plan.model.arguments) | {key: value for key, _, value in given}
    axes = infer_axes(plan.graph)
    layers = find_layers(plan.graph, axes)

    def planned(constraints: Constraints) -> Plan:
        texts = [f"{key}={value}" for key, value in chosen.items()]
        return make_plan(spec, texts, plan.cluster, constraints, time_limit_seconds=None)

    def planned_by_degrees() -> Plan:
        try:
            return planned(arrangement_constraints(plan))
        except InfeasibleError as error:
            raise _refusal(plan, arguments, error) from None

    try:
        found = planned(whole_constraints(plan, axes, layers))
    except (InputError, InfeasibleError):  # a smaller model may lack a module or an axis
        found = planned_by_degrees()
    return Smaller(plan=found, unlike=tuple(sorted(_splits(plan) - _splits(found))))


def _refusal(plan: Plan, arguments: Sequence[str], error: InfeasibleError) -> InfeasibleError:
    arranged = plan.arrangement
    sizes = f", and sizes that {arranged.tensor} divides" if arranged.tensor > 1 else ""
    return InfeasibleError(
        f"{plan.model.name} with {', '.join(arguments)} cannot be arranged as the plan is "
        f"({arrangement_words(arranged)}): {error.found}",
        fix=f"give it layers for {arranged.pipeline * arranged.stages_per_rank} stages{sizes}",
    )


def _splits(plan: Plan) -> set[str]:
    """Return what is split along which axis; equal layers are listed once."""
    axes = infer_axes(plan.graph)
    return {
        f"{one.op} of {line.name}{'.' * bool(one.module)}{one.module} along {one.axis}"
        for line in class_layouts(plan, axes, find_layers(plan.graph, axes))
        for one in line.splits
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plans for all numbers of devices, the chosen one, and whether fewer suffice."""

    curve: Curve
    choice: ChosenPoint
    fewer: Fewer | None = None

    @property
    def plan(self) -> Plan:
        """The plan for the chosen number of devices."""
        return self.choice.point.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A planning request: the model, the machines, the constraints."""

    model: str  # path.py or path.py:factory
    arguments: tuple[str, ...]  # "key=value", for functions of the model file
    clusters: tuple[Cluster, ...]  # one of them is chosen
    constraints: Constraints
    time_limit_seconds: float | None = None
    measured: MeasuredFile | None = None


def request_of(
    model: str,
    *,
    arguments: Sequence[str],
    machines: MachineOptions,
    pins: Sequence[str],
    demands: Mapping[str, object],
    constraints: Path | None,
    time_limit_seconds: float | None,
    profile: Path | None,
) -> Request:
    """Return what some options ask for, checked; `demands` are as in `DemandOptions`."""
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
    """Trace a model and find its best plan on one cluster."""
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
    """Trace a model once, find its best plan on each cluster, and choose one of them.

    Impossible requests are rejected as early as possible.
    """
    # imported here, because other commands need no solver
    from autopar.planner.plan.fleet import fewer_as_fast, planned_curve
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
    if constraints.precision.scales_loss:
        check_means(training.graph, microbatch=found.arrangement.microbatch)
    note_objects_kept(found, training.layers)
    note_plan(found)
    note_unaligned(found, training.axes)
    return Planned(curve=curve, choice=choice, fewer=fewer)


def scripted(
    request: Request,
    destination: Path,
    *,
    plans: Callable[[Request], Planned] = make_plans,
) -> tuple[Planned, str]:
    """Return the best plan that a script can be written for, and the script.

    A layer can only be recomputed if the script calls it as a module, which shows when the script
    is written. If it does not, the plan is made again without recomputing that layer.
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
    """Reject constraints that leave no possible degrees on any cluster."""
    batch = BatchFacts.of(graph) if graph is not None else BatchFacts(may_be_uneven=True)
    *fewer, last = (cluster.size for cluster in clusters)
    if not any(leave_degrees(constraints.declared, size, batch) for size in fewer):
        check_degrees(last, constraints, batch)


def read_training(request: Request, report: Callable[[str], None]) -> Training:
    """Trace the model and return what a search needs of it; print notes.

    The last cluster is the largest one.
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
    if constraints.precision.scales_loss:
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
    """Whether it is worth planning for fewer devices: not on CPUs, which are for testing."""
    is_cpu = any(node.device.is_cpu for node in cluster.nodes)
    return not is_cpu and constraints.objective is not Objective.MEMORY


TOLERANCE = 1e-9  # in float64, after several steps of AdamW
STEPS = 3
MANY_FLOPS = 2e12  # a larger step takes minutes on CPUs
_QUICK_SECONDS = 10.0
_START_SECONDS = 3.0  # for a process to import torch, on a core of its own
_FLOPS_PER_SECOND = 1e9  # of a core, in float64 with small tensors


def is_quick(plan: Plan, cores: int) -> bool:
    """Whether verifying a plan takes less than ten seconds, as for models of tests and demos.

    False for plans that deliberately train otherwise than one process.
    """
    if parts_apart(plan) or statistics_apart(plan):
        return False
    processes = plan.arrangement.ranks + 1
    computed = 2 * (STEPS + 1) * step_flops(plan)  # by all ranks together, and again by one process
    seconds = _START_SECONDS * max(1.0, processes / cores) + computed / _FLOPS_PER_SECOND
    return seconds < _QUICK_SECONDS


def verified(plan: Plan, folder: Path, script: Path) -> TrainingComparison | None:
    """Return how a script compares with one process, or None with a note why that is unknown."""
    try:
        check_fits(plan, memory_bytes())
        ranks = plan.arrangement.ranks
        with progress(f"training {STEPS} steps on {ranks} processes and on one"):
            return verify(plan, folder, read_script_of(plan, script, folder), steps=STEPS)
    except AutoparError as error:
        why = error.found
    except Exception as error:  # the model may raise anything on CPUs
        why = f"{type(error).__name__}: {error}"
    tell_note(f"the plan could not be verified on the CPUs here: {why}")
    return None


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verify_command(plan: Plan, folder: Path) -> str:
    """Return the command that verifies a plan; with a smaller model if this one is too large."""
    is_large = step_flops(plan) > MANY_FLOPS
    smaller = " --arg NAME=VALUE (a smaller model: see its build_model)" if is_large else ""
    return f"autopar verify {folder}{smaller}"
