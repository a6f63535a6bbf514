"""Turns a model file and options into a plan and its script."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.console import print_note, status_line
from autopar.notes import note_found, note_traced
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.errors import LostLayersError
from autopar.planner.files import refuse_replacing
from autopar.planner.model.functions import DATA_READS
from autopar.planner.model.guard import folder_from
from autopar.planner.model.model_file import load_model_file, model_path, split_spec
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.declared.limits import rows_at_once, without_recompute
from autopar.planner.plan.files.cache import (
    NO_CACHE,
    Cache,
    CachedScript,
    Question,
    cache_folder,
    owners,
)
from autopar.planner.plan.files.document import parse_plan, plan_text
from autopar.planner.plan.fleet import Training
from autopar.planner.plan.plan import Plan, StoredPlan, with_graph
from autopar.planner.plan.planned import (
    PlanDemands,
    Planned,
    check_demands,
    plan_training,
    training_of,
)
from autopar.planner.plan.search.ahead import Idle, idle_cores, may_fork
from autopar.planner.plan.search.demands import may_compile
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
from autopar.planner.programs.layouts.rules import find_slots

# Modules that need torch are imported in functions: planning a cached model needs no torch.
if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from autopar.codegen.subject import BuiltModel


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
    with status_line("tracing the model"):
        return with_planned_graph(plan, trace_planned(plan, folder), path)


def recalled_plan(plan: StoredPlan, folder: Path) -> Plan | None:
    """Return a plan with the graph of its model from the cache, or None; runs no model file."""
    if isinstance(plan, Plan):
        return plan
    spec = model_spec(plan, folder)
    check_unchanged(plan, model_path(spec))
    arguments = [f"{key}={value}" for key, value in plan.model.arguments]
    own, rows = plan.arrangement, plan.model.batch.fixed
    compiles = own.compile.takes_layers
    question = _question(spec, arguments, own.precision, rows, compiles=compiles)
    known = question.find(cache_of(uses_cache=True))
    return with_graph(plan, known.graph) if known is not None and fits(plan, known) else None


def script_of(
    plan: StoredPlan,
    destination: Path,
    *,
    folder: Path | None = None,
    uses_cache: bool = True,
    built: BuiltModel | None = None,
) -> CachedScript:
    """Return the script of a plan for a path, from the cache if it is known.

    A script depends on its place only by the relative path from there to the model file. The model
    file is looked for in the working directory, then in `folder` (the script's by default) and its
    parents. `built` is the model, if it has been built already.
    """
    place, cache = destination.resolve(), cache_of(uses_cache)
    beside = place.parent if folder is None else folder
    path = model_path(model_spec(plan, beside))
    check_unchanged(plan, path)
    timeless = replace(plan, proof=replace(plan.proof, search_seconds=0.0))
    question = (plan_text(timeless), path, place.name, folder_from(place, path), Path.cwd())
    known = cache.find(CachedScript, question)
    made = known or _emitted(plan, destination, beside, uses_cache=uses_cache, built=built)
    if known is None:
        cache.keep(made, question, model=path)
    refuse_replacing(place, path)
    if made.lost:
        raise LostLayersError(made.lost)
    return made


def _emitted(
    plan: StoredPlan,
    destination: Path,
    folder: Path,
    *,
    uses_cache: bool,
    built: BuiltModel | None,
) -> CachedScript:
    from autopar.codegen.emit import emit_with_notes

    with DATA_READS.watched():
        whole, cache = traced_plan(plan, folder, uses_cache=uses_cache), cache_of(uses_cache)
        try:
            text, notes = emit_with_notes(
                whole, destination=destination, folder=folder, cache=cache, built=built
            )
        except LostLayersError as lost:
            return CachedScript(lost=lost.paths)
    return CachedScript(text=text, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(PlanDemands):
    """A model, and everything that its plan must satisfy."""

    model: str  # path.py or path.py:factory
    arguments: tuple[str, ...]  # "key=value", for functions of the model file
    uses_cache: bool = True


def make_plan(
    spec: str,
    arguments: Sequence[str],
    cluster: Cluster,
    constraints: Constraints,
    *,
    time_limit_seconds: float | None = None,
) -> Plan:
    """Trace a model and find its best plan on one cluster."""
    request = Request(
        model=spec,
        arguments=tuple(arguments),
        clusters=(cluster,),
        constraints=constraints,
        time_limit_seconds=time_limit_seconds,
        looks_at_fewer=False,
    )
    return make_plans(request).plan


def make_plans(
    request: Request,
    *,
    on_search: Callable[[Training], None] = lambda _: None,
    on_found: Callable[[Plan], None] = lambda _: None,
    workers: Idle = idle_cores,
) -> Planned:
    """Trace a model once, find its best plan on each cluster, and choose one of them.

    Impossible requests are rejected as early as possible. `on_search` is called before a search
    with the training, and `on_found` with its plan, but not if the cache has its result. `workers`
    are as in `plan_training`.
    """
    check_demands(request)
    with status_line("tracing the model") as report:
        traced = read_model(request)
        report("finding its axes and layers")
        training = training_of(traced, request)
        note_traced(traced, training, request.clusters[-1])
        found = plan_training(
            training,
            request,
            report,
            cache=cache_of(request.uses_cache),
            on_search=on_search,
            on_found=on_found,
            workers=workers,
        )
    note_found(found.plan, training)
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
    asked, demanded = request.arguments, request.constraints
    compiles = any(may_compile(cluster, demanded) for cluster in request.clusters)
    rows = rows_at_once(demanded)
    return _question(request.model, asked, demanded.precision, rows, compiles=compiles)


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


def scripted(request: Request, destination: Path) -> tuple[Planned, str]:
    """Return the best plan that a script can be written for, and the script.

    A layer can only be recomputed if the script calls it as a module, which is known once the
    script is written. Otherwise the plan is made again without recomputing that layer. If the
    cached graph is outdated, the plan is made again without the cache.
    """
    try:
        with closing(_ScriptProcess(request, destination)) as process:
            found = make_plans(
                request,
                on_search=process.start,
                on_found=process.write,
                workers=lambda: idle_cores(1 + process.is_busy),
            )
            process.wait()
        made = script_of(found.plan, destination, uses_cache=request.uses_cache)
    except ChangedModelError as changed:
        if not request.uses_cache:
            raise
        _asked(request).forget(cache_of(uses_cache=True))
        print_note(f"planned again without the cache: {changed.found}")
        return scripted(replace(request, uses_cache=False), destination)
    except LostLayersError as lost:
        why = "the script inlines this code into its caller, so there is no call to recompute"
        rest = without_recompute(request.constraints, lost.paths, origin=why)
        if rest is None:
            raise
        print_note(f"planned again without recomputing {', '.join(lost.paths)}: {why}")
        return scripted(replace(request, constraints=rest), destination)
    for note in made.notes:
        print_note(note)
    return found, made.text


class _ScriptProcess:
    """A fork that prepares the script while this process searches for a plan.

    If this process has no torch, the fork imports torch, builds the model, and later writes the
    script into the cache; its errors are ignored, because this process meets them again. If this
    process has torch, the fork traces the model on rows of other lengths (see `lengths_process`).
    """

    def __init__(self, request: Request, destination: Path) -> None:
        self._request, self._place = request, destination
        self._process: BaseProcess | None = None
        self._plans: Connection | None = None  # to a fork that writes the script

    def start(self, training: Training) -> None:
        """Start the fork, if there is a cache."""
        if not self._request.uses_cache or not may_fork():
            return
        asked, model = _asked(self._request), self._request.model
        if "torch" in sys.modules:
            from autopar.codegen.subject import lengths_process

            self._process = lengths_process(asked, model, cache_of(uses_cache=True))
            return
        find_slots(training.graph, training.axes, training.layers)  # both processes need them
        context = get_context("fork")
        there, self._plans = context.Pipe()
        self._process = context.Process(
            target=_write_script,
            args=(there, self._plans, self._request, self._place, training),
            daemon=True,
        )
        self._process.start()
        there.close()

    @property
    def is_busy(self) -> bool:
        """Whether the fork needs a core of its own: it runs, and does not wait for the plan."""
        if self._process is None or not self._process.is_alive():
            return False
        return self._plans is None or not self._plans.poll()

    def write(self, plan: Plan) -> None:
        """Give a plan to the fork, if it writes scripts."""
        if self._plans is not None:
            with suppress(OSError):  # it has failed
                self._plans.send(plan_text(plan))

    def wait(self) -> None:
        """Wait until the fork has written the script, if it got a plan."""
        if self._plans is not None and self._process is not None:
            with status_line("writing the script"):
                self._process.join()

    def close(self) -> None:
        """End the fork."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._plans is not None:
            self._plans.close()


def _write_script(
    plans: Connection, others: Connection, request: Request, destination: Path, training: Training
) -> None:
    """Build the model, receive a plan, and write its script into the cache.

    The plan comes when the search has ended; none comes if the search fails.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the search, which ends this process
    others.close()  # so that this process notices when the search ends
    with Path(os.devnull).open("r+b") as nowhere:  # for the model file, if it reads or prints
        for stream in range(3):
            os.dup2(nowhere.fileno(), stream)
    with DATA_READS.watched(), suppress(EOFError):
        from autopar.codegen.emit import BuiltModel, prepare

        file = load_model_file(request.model, request.arguments)
        built = BuiltModel.of(file, training.graph, (training.axes, training.layers))
        prepare(built)
        owners()  # slow, and needed for the cache: called while the search runs
        plans.send(None)  # says that this process waits
        plan = parse_plan(plans.recv(), where="the search")
        script_of(with_graph(plan, training.graph), destination, built=built)
