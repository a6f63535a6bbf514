"""Traces a model file into the plain data that a plan needs; finds the model file of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.findings import OptimizerTraits, with_moments
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file, model_path
from autopar.planner.plan.plan import Model, Plan, StoredPlan, model_facts, source_hash, with_graph
from autopar.planner.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A traced model.

    `notes` tell the user what a few rows of the dataset showed; None if no rows were read.
    """

    model: Model
    graph: Graph  # with the moments of its optimizer
    optimizer: OptimizerTraits | None  # None if it cannot be tried here
    notes: tuple[str, ...] | None = None


def trace_model(
    model_file: ModelFile,
    *,
    spec: str,
    arguments: Sequence[str],
    precision: Precision,
    rows: int | None,
    compiles: bool,
) -> TracedModel:
    """Trace a model file, and try its optimizer.

    `rows` are those of a microbatch, for a model that accepts only one number of rows. If layers
    may be compiled (`compiles`), the graph also gets the lines that torch.compile cannot trace.
    """
    from autopar.planner.findings.optimizer import optimizer_traits  # needs torch
    from autopar.planner.trace import trace_for_rows
    from autopar.planner.trace.breaks import graph_breaks

    graph = trace_for_rows(model_file, rows, precision)
    if compiles:
        graph = replace(graph, breaks=graph_breaks(model_file, graph))
    optimizer = optimizer_traits(model_file, graph)
    graph = with_moments(graph, optimizer)
    model = model_facts(model_file, graph, spec=spec, arguments=arguments)
    return TracedModel(model=model, graph=graph, optimizer=optimizer)


def with_spec(traced: TracedModel, spec: str) -> TracedModel:
    """Return a traced model with another path to the same file."""
    return replace(traced, model=replace(traced.model, spec=spec))


class ChangedModelError(AutoparError):
    """The model file differs from the one that was planned."""

    exit_code = ExitCode.MISMATCH


def model_spec(plan: StoredPlan, folder: Path) -> str:
    """Return `path.py:factory` of a plan's model, found here, in `folder` or in a parent of it."""
    spec = plan.model.spec
    name = spec.rpartition(".py")[0] + ".py"
    if Path(name).is_file():
        return spec
    resolved = folder.resolve()
    for place in (resolved, *resolved.parents):
        if (place / name).is_file():
            return str(place / spec)
    raise InputError(
        f"the plan is for {name}, which is neither here nor beside the plan or above it",
        where=f"{Path.cwd()} and {resolved}",
        fix="say where it is: --model PATH; or run this where `autopar plan` was run",
    )


def with_model(plan: StoredPlan, folder: Path, given: str | None) -> StoredPlan:
    """Return a plan with the model file given on the command line, if any.

    A plan.json may come from anybody. A path in it that leads outside of the working directory
    and the plan's folder is refused, unless the command line gives it.
    """
    if given is not None:
        factory = plan.model.spec.rpartition(".py")[2] if given.endswith(".py") else ""
        return replace(plan, model=replace(plan.model, spec=given + factory))
    path = model_path(model_spec(plan, folder))
    named = Path(plan.model.spec)
    leads_out = named.is_absolute() or ".." in named.parts
    if leads_out and not any(place.resolve() in path.parents for place in (Path(), folder)):
        raise InputError(
            f"the plan names the model file {path}, which lies neither here nor beside the plan",
            fix=f"if it is yours, give it on the command line: --model {path}",
        )
    return plan


def trace_planned(plan: StoredPlan, folder: Path) -> TracedModel:
    """Trace the model of a stored plan again."""
    arguments = [f"{key}={value}" for key, value in plan.model.arguments]
    return trace_model(
        planned_file(plan, folder),
        spec=plan.model.spec,
        arguments=arguments,
        precision=plan.arrangement.precision,
        rows=plan.model.batch.fixed,
        compiles=plan.arrangement.compile.takes_layers,
    )


def fits(plan: StoredPlan, traced: TracedModel) -> bool:
    """Whether a traced model computes what was planned."""
    return traced.model.graph_hash == plan.model.graph_hash


def with_planned_graph(plan: StoredPlan, traced: TracedModel, path: Path) -> Plan:
    """Return a stored plan with the graph of its model; raise if the graph has changed."""
    if not fits(plan, traced):
        raise ChangedModelError(
            "the model computes something else than what was planned, though none of its own files "
            "has changed",
            where=str(path),
            expected="what it reads (a library, a configuration, an environment variable) as it "
            "was when it was planned",
            fix="plan again with `autopar plan`, or restore what has changed",
        )
    return with_graph(plan, traced.graph)


def planned_file(plan: StoredPlan, folder: Path) -> ModelFile:
    """Load the model file of a plan; raises if it is not the planned one."""
    spec = model_spec(plan, folder)
    check_unchanged(plan, model_path(spec))  # before it is imported
    file = load_model_file(spec, [f"{key}={value}" for key, value in plan.model.arguments])
    check_functions(plan, file)
    return file


def check_functions(plan: StoredPlan, file: ModelFile) -> None:
    """Raise if a model file lacks functions that the plan was made with, or has others."""
    for fact, function in (
        ("has_loss", file.loss),
        ("has_dataset", file.build_dataset),
        ("has_optimizer", file.build_optimizer),
        ("has_scheduler", file.build_scheduler),
    ):
        if getattr(plan.model, fact) != (function is not None):
            raise InputError(
                f"model.{fact} is {getattr(plan.model, fact)}, but the model file says otherwise",
                where=str(file.path),
                fix="plan again with `autopar plan`",
            )


def check_unchanged(plan: StoredPlan, path: Path) -> None:
    """Raise if a model file, or one that it imports, has changed since it was planned."""
    if source_hash(path) != plan.model.source_hash:
        raise ChangedModelError(
            "the model file, or one that it imports, has changed since it was planned for",
            where=str(path),
            fix="plan again with `autopar plan`",
        )
