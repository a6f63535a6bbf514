"""Turns a plan into its subject: the loaded model file, its modules, and the opened classes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from torch import nn

from autopar.codegen.forward.emit import opened_classes
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.modules import Modules, modules_of
from autopar.codegen.forward.reading.split import split_of
from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.model.model_file import ModelFile, load_model_file, model_path
from autopar.planner.model.without_memory import without_memory
from autopar.planner.plan.plan import Model, Plan, StoredPlan, source_hash, with_graph
from autopar.planner.plan.traced import TracedModel, trace_model
from autopar.planner.precision import Precision
from autopar.planner.trace.lengths import with_other_lengths


class ChangedModelError(AutoparError):
    """The model file differs from the one that was planned."""

    exit_code = ExitCode.MISMATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSubject:
    """A plan's model file, graph, modules, axes and layers, and the source printed for them."""

    file: ModelFile
    graph: Graph
    modules: Modules
    axes: GraphAxes
    layers: Layers
    opened: OpenedSource


def subject_of(plan: Plan, folder: Path) -> PlannedSubject:
    """Return a plan's subject; a relative model file lies in the working directory or `folder`."""
    file = _model_file(plan, folder)
    model = without_memory(file)
    _check_same_parameters(plan, model, file.path)
    _check_same_modules(plan, model, file.path)
    modules = modules_of(model)
    split = split_of(plan, modules, partial(_on_other_lengths, _Traced.of(plan, file)))
    return PlannedSubject(
        file=file,
        graph=plan.graph,
        modules=modules,
        axes=split.axes,
        layers=split.layers,
        opened=opened_classes(
            plan,
            split,
            is_evaluated=file.build_eval_dataset is not None,
            has_metrics=file.metrics is not None,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """A traced model as a cache's key: equal for the same file, arguments and precision."""

    path: Path
    facts: Model
    precision: Precision
    fixed_batch: int | None
    graph: Graph = field(compare=False)
    file: ModelFile = field(compare=False)

    @classmethod
    def of(cls, plan: Plan, file: ModelFile) -> _Traced:
        """Return the model of a plan."""
        return cls(
            path=file.path,
            facts=plan.model,
            precision=plan.arrangement.precision,
            fixed_batch=plan.graph.fixed_batch,
            graph=plan.graph,
            file=file,
        )


def _on_other_lengths(model: _Traced) -> Graph | None:
    """Return the model's graph for rows of other lengths, or None if none fits the plan."""
    other = _traced_on_other_lengths(model)
    is_alike = other is not None and other.tensors.keys() == model.graph.tensors.keys()
    return other if is_alike else None  # the plan may have been edited


@lru_cache(maxsize=16)
def _traced_on_other_lengths(model: _Traced) -> Graph | None:
    """Return the graph for rows of other lengths, cached for all plans of a model.

    The graph takes another trace, and `dryrun`, `verify` or a program that plans for several
    machines may print several scripts of one model.
    """
    axes = infer_axes(model.graph)
    return with_other_lengths(model.file, model.graph, axes, model.precision)


def _check_same_parameters(plan: Plan, model: nn.Module, path: Path) -> None:
    """Raise if the model's parameters differ from the plan's, though its Python files do not."""
    planned = {p.name: tuple(size.at(1) for size in p.shape) for p in plan.graph.parameters}
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sorted(planned.keys() | built.keys()):
        now, then = built.get(name), planned.get(name)
        if now != then:
            raise ChangedModelError(
                "the model file builds another model than was planned, though no Python file has "
                f"changed: {name} {_sized(now)}, and {_sized(then)} in the plan",
                where=str(path),
                expected="what it reads (a configuration, an environment variable) as it was",
                fix="plan again with `autopar plan`, or bring that back",
            )


def _check_same_modules(plan: Plan, model: nn.Module, path: Path) -> None:
    """Raise if the model lacks a module that the plan calls, or has it with another class."""
    classes = {
        name: type(one).__name__ for name, one in model.named_modules(remove_duplicate=False)
    }
    for call in plan.graph.calls.values():
        found = classes.get(call.path)
        if not call.is_function and found != call.class_name:
            now = "is not there" if found is None else f"is a {found}"
            raise ChangedModelError(
                f"the plan calls {call.path or 'the model'}, a {call.class_name}, which {now} in "
                "the model",
                where=str(path),
                fix="plan again with `autopar plan`",
            )


def _sized(shape: tuple[int, ...] | None) -> str:
    return "is not there" if shape is None else f"has the shape {list(shape)}"


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
        _model_file(plan, folder),
        spec=plan.model.spec,
        arguments=arguments,
        precision=plan.arrangement.precision,
        rows=plan.model.batch.fixed,
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
            fix="plan again with `autopar plan`, or bring that back",
        )
    return with_graph(plan, traced.graph)


def _model_file(plan: StoredPlan, folder: Path) -> ModelFile:
    spec = model_spec(plan, folder)
    check_unchanged(plan, model_path(spec))  # before it is imported
    file = load_model_file(spec, [f"{key}={value}" for key, value in plan.model.arguments])
    for fact, function in (
        ("has_loss", file.loss),
        ("has_dataset", file.build_dataset),
        ("has_optimizer", file.build_optimizer),
        ("has_scheduler", file.build_scheduler),
    ):
        if getattr(plan.model, fact) != (function is not None):
            raise InputError(
                f"model.{fact} is {getattr(plan.model, fact)}, and the model file is otherwise",
                where=str(file.path),
                fix="plan again with `autopar plan`",
            )
    return file


def check_unchanged(plan: StoredPlan, path: Path) -> None:
    """Raise if a model file, or one that it imports, has changed since it was planned."""
    if source_hash(path) != plan.model.source_hash:
        raise ChangedModelError(
            "the model file, or one that it imports, has changed since it was planned for",
            where=str(path),
            fix="plan again with `autopar plan`",
        )
