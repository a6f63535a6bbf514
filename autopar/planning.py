"""Turns a model file and options into a plan, its script, and the verification of the script."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.console import print_note, progress, status_line
from autopar.notes import (
    note_breaks,
    note_compiling,
    note_devices,
    note_objects_kept,
    note_offload,
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
from autopar.planner.costs.prediction import Compile
from autopar.planner.errors import AutoparError, LostLayersError
from autopar.planner.files import refuse_replacing
from autopar.planner.model.functions import DATA_READS
from autopar.planner.model.model_file import load_model_file, model_path, split_spec
from autopar.planner.plan.declared.constraints import Constraints, check_work, without_recompute
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.declared.limits import rows_at_once
from autopar.planner.plan.files.cache import (
    NO_CACHE,
    Cache,
    CachedScript,
    Question,
    cache_folder,
)
from autopar.planner.plan.files.document import plan_text
from autopar.planner.plan.fleet import Training
from autopar.planner.plan.plan import Plan, StoredPlan, with_graph
from autopar.planner.plan.planned import (
    PlanDemands,
    Planned,
    check_demands,
    plan_training,
    training_of,
)
from autopar.planner.plan.search.demands import may_compile
from autopar.planner.plan.telling.words import parts_apart, statistics_apart
from autopar.planner.plan.traced import (
    ChangedModelError,
    TracedModel,
    check_unchanged,
    fits,
    model_spec,
    trace_model,
    trace_planned,
    with_planned_graph,
    with_spec,
)
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile, read_measurements

# Modules that need torch are imported in functions: planning a cached model needs no torch.
if TYPE_CHECKING:
    from autopar.codegen.proof.comparison import TrainingComparison


def cache_of(uses_cache: bool) -> Cache:
    """Return the user's cache, or a cache that keeps nothing."""
    return Cache(cache_folder(), notify=print_note) if uses_cache else NO_CACHE


def traced_plan(plan: StoredPlan, folder: Path, *, uses_cache: bool = True) -> Plan:
    """Return a plan with its model's graph, traced anew if neither plan nor cache has it."""
    known = recalled_plan(plan, folder) if uses_cache or isinstance(plan, Plan) else None
    if known is not None:
        return known
    path = model_path(model_spec(plan, folder))
    check_unchanged(plan, path)
    with progress("tracing the model"):
        return with_planned_graph(plan, trace_planned(plan, folder), path)


def recalled_plan(plan: StoredPlan, folder: Path) -> Plan | None:
    """Return a plan with the graph of its model from the cache, or None; runs no model file."""
    if isinstance(plan, Plan):
        return plan
    spec = model_spec(plan, folder)
    check_unchanged(plan, model_path(spec))
    arguments = [f"{key}={value}" for key, value in plan.model.arguments]
    own, rows = plan.arrangement, plan.model.batch.fixed
    compiles = own.compile is Compile.LAYERS
    question = _question(spec, arguments, own.precision, rows, compiles=compiles)
    known = question.find(cache_of(uses_cache=True))
    return with_graph(plan, known.graph) if known is not None and fits(plan, known) else None


def script_of(
    plan: StoredPlan, destination: Path, *, folder: Path | None = None, uses_cache: bool = True
) -> CachedScript:
    """Return the script of a plan for a path, from the cache if plan, model and path are known.

    A relative path of the model file is looked for in the working directory, then in `folder` (that
    of the script by default) and in its parents.
    """
    place, cache = destination.resolve(), cache_of(uses_cache)
    beside = place.parent if folder is None else folder
    path = model_path(model_spec(plan, beside))
    check_unchanged(plan, path)
    timeless = replace(plan, proof=replace(plan.proof, search_seconds=0.0))
    question = (plan_text(timeless), path, place, beside.resolve(), Path.cwd())
    known = cache.find(CachedScript, question)
    made = known or _emitted(plan, destination, beside, uses_cache=uses_cache)
    if known is None:
        cache.keep(made, question, model=path)
    refuse_replacing(place, path)
    if made.lost:
        raise LostLayersError(made.lost)
    return made


def _emitted(
    plan: StoredPlan, destination: Path, folder: Path, *, uses_cache: bool
) -> CachedScript:
    from autopar.codegen.emit import emit_with_notes

    with DATA_READS.watched():
        whole, cache = traced_plan(plan, folder, uses_cache=uses_cache), cache_of(uses_cache)
        try:
            text, notes = emit_with_notes(
                whole, destination=destination, folder=folder, cache=cache
            )
        except LostLayersError as lost:
            return CachedScript(lost=lost.paths)
    return CachedScript(text=text, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A planning request: the model, the machines, the constraints."""

    model: str  # path.py or path.py:factory
    arguments: tuple[str, ...]  # "key=value", for functions of the model file
    clusters: tuple[Cluster, ...]  # one of them is chosen
    constraints: Constraints
    time_limit_seconds: float | None = None
    measured: MeasuredFile | None = None
    uses_cache: bool = True


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
    uses_cache: bool = True,
) -> Request:
    """Check options and return them as a request; `demands` are as in `DemandOptions`."""
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
        uses_cache=uses_cache,
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
    demands = PlanDemands(
        clusters=request.clusters,
        constraints=request.constraints,
        time_limit_seconds=request.time_limit_seconds,
        measured=request.measured,
        looks_at_fewer=looks_at_fewer,
    )
    check_demands(demands)
    with status_line("tracing the model") as report:
        traced = read_model(request)
        report("finding its axes and layers")
        training = training_of(traced, demands)
        _tell_findings(traced, training, request)
        cache = cache_of(request.uses_cache)
        found = plan_training(training, demands, report, cache=cache)
    note_objects_kept(found.plan, training.layers)
    note_plan(found.plan)
    note_unaligned(found.plan, training.axes)
    note_compiling(found.plan, training.axes, training.layers)
    note_breaks(found.plan)
    note_offload(found.plan)
    return found


def _question(
    model: str, arguments: Sequence[str], precision: Precision, rows: int | None, *, compiles: bool
) -> Question:
    path, factory = split_spec(model)
    return Question(
        path=path,
        factory=factory,
        arguments=tuple(arguments),
        precision=precision,
        rows=rows,
        compiles=compiles,
    )


def _asked(request: Request) -> Question:
    """Return the key under which the cache has the traced model of a request."""
    constraints = request.constraints
    return _question(
        request.model,
        request.arguments,
        constraints.precision,
        rows_at_once(constraints),
        compiles=any(may_compile(cluster, constraints) for cluster in request.clusters),
    )


def read_model(request: Request) -> TracedModel:
    """Return the traced model of a request, from the cache if the model has not changed.

    A model that is not cached is traced, and some rows of its dataset are checked.
    """
    question, cache = _asked(request), cache_of(request.uses_cache)
    known = question.find(cache)
    if known is not None and known.notes is not None:
        return with_spec(known, request.model)
    from autopar.dataset_notes import check_dataset, check_metrics

    with DATA_READS.watched():
        file = load_model_file(request.model, request.arguments)
        traced = trace_model(
            file,
            spec=request.model,
            arguments=request.arguments,
            precision=question.precision,
            rows=question.rows,
            compiles=question.compiles,
        )
        notes = list[str]()
        check_dataset(file, traced.graph, infer_axes(traced.graph), notes.append)
        check_metrics(file, traced.graph, traced.model)
    traced = replace(traced, notes=tuple(notes))
    question.keep(traced, cache)
    return traced


def _tell_findings(traced: TracedModel, training: Training, request: Request) -> None:
    """Print notes about a model before the search for its plan."""
    graph = traced.graph
    for note in traced.notes or ():
        print_note(note)
    note_own_choices(graph)
    note_own_gradients(graph)
    note_optimizer(traced.optimizer)
    note_devices(graph, request.clusters[-1])
    note_rows(graph, training.constraints)
    note_unpriced(graph, training.axes)


def scripted(
    request: Request,
    destination: Path,
    *,
    plans: Callable[[Request], Planned] = make_plans,
) -> tuple[Planned, str]:
    """Return the best plan that a script can be written for, and the script.

    A layer can only be recomputed if the script calls it as a module, which is known once the
    script is written. Otherwise the plan is made again without recomputing that layer. If the
    cached graph is outdated, the plan is made again without the cache.
    """
    found = plans(request)
    try:
        made = script_of(found.plan, destination, uses_cache=request.uses_cache)
    except ChangedModelError as changed:
        if not request.uses_cache:
            raise
        _asked(request).forget(cache_of(uses_cache=True))
        print_note(f"planned again without the cache: {changed.found}")
        return scripted(replace(request, uses_cache=False), destination, plans=plans)
    except LostLayersError as lost:
        why = "the script inlines this code into its caller, so there is no call to recompute"
        rest = without_recompute(request.constraints, lost.paths, origin=why)
        if rest is None:
            raise
        print_note(f"planned again without recomputing {', '.join(lost.paths)}: {why}")
        return scripted(replace(request, constraints=rest), destination, plans=plans)
    for note in made.notes:
        print_note(note)
    return found, made.text


TOLERANCE = 1e-9  # in float64, after several steps of AdamW
STEPS = 3
MANY_FLOPS = 2e12  # a larger step takes minutes on CPUs
_QUICK_SECONDS = 10.0
_START_SECONDS = 3.0  # for a process to import torch, if it has a core
_FLOPS_PER_SECOND = 1e9  # of a core, in float64 with small tensors


def is_quick(plan: Plan, cores: int) -> bool:
    """Whether verifying a plan takes less than ten seconds, as for models of tests and demos.

    False for plans that deliberately train differently from one process.
    """
    if parts_apart(plan) or statistics_apart(plan):
        return False
    processes = plan.arrangement.ranks + 1
    computed = 2 * (STEPS + 1) * plan.step_flops  # by all ranks together, and by one process
    seconds = _START_SECONDS * max(1.0, processes / cores) + computed / _FLOPS_PER_SECOND
    return seconds < _QUICK_SECONDS


def verified(plan: Plan, folder: Path, script: Path) -> TrainingComparison | None:
    """Compare a script with one process; if the comparison fails, print why and return None.

    Layers run uncompiled (eager), because compiling would take much longer than the training.
    """
    from autopar.codegen.proof.verification import check_fits, read_script_of, verify

    try:
        check_fits(plan, memory_bytes())
        ranks = plan.arrangement.ranks
        with progress(f"training {STEPS} steps on {ranks} processes and on one"):
            given = read_script_of(plan, script, folder)
            return verify(plan, folder, given, steps=STEPS, compiles=False)
    except AutoparError as error:
        why = error.found
    except Exception as error:  # the model may raise anything on CPUs
        why = f"{type(error).__name__}: {error}"
    print_note(f"the plan could not be verified on the CPUs here: {why}")
    return None


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verify_command(plan: Plan, folder: Path) -> str:
    """Return the command that verifies a plan, with a smaller model if the plan's is too large."""
    is_large = plan.step_flops > MANY_FLOPS
    smaller = " --arg NAME=VALUE (a smaller model: see build_model in the model file)"
    return f"autopar verify {folder}{smaller if is_large else ''}"
