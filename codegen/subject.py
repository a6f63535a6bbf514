"""Loads a plan's model, and prints the forwards that the plan changes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import StringIO
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch import nn

from autopar.codegen.forward.emit import opened_classes
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.modules import Modules, modules_of
from autopar.codegen.forward.reading.split import split_of
from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.model.functions import DATA_READS
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.model.without_memory import without_memory
from autopar.planner.plan.again import GraphParts
from autopar.planner.plan.files.cache import NO_CACHE, Cache, CachedLengths, Question, lengths_found
from autopar.planner.plan.files.graph import graph_document
from autopar.planner.plan.plan import Model, Plan
from autopar.planner.plan.traced import (
    ChangedModelError,
    check_functions,
    planned_file,
    with_spec,
)
from autopar.planner.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSubject:
    """A plan's model (file, graph, modules, axes, layers), and the forwards printed for it."""

    file: ModelFile
    graph: Graph
    modules: Modules
    axes: GraphAxes
    layers: Layers
    opened: OpenedSource


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A loaded model file, and the model that it builds, on the meta device.

    `graph` is the model's trace, `parts` are its axes and layers; None: only the plan has them.
    """

    file: ModelFile
    model: nn.Module
    modules: Modules
    graph: Graph | None = None
    parts: GraphParts | None = None

    @classmethod
    def of(
        cls, file: ModelFile, graph: Graph | None = None, parts: GraphParts | None = None
    ) -> BuiltModel:
        """Build the model of a file."""
        model = without_memory(file)
        return cls(file=file, model=model, modules=modules_of(model), graph=graph, parts=parts)


def subject_of(
    plan: Plan, folder: Path, cache: Cache = NO_CACHE, built: BuiltModel | None = None
) -> PlannedSubject:
    """Load a plan's model; a relative path is looked up in the working directory, then `folder`.

    `built` is the model, if it is built already.
    """
    if built is None:
        built = BuiltModel.of(planned_file(plan, folder))
    else:
        check_functions(plan, built.file)
    file, model, modules = built.file, built.model, built.modules
    parts = built.parts if plan.graph is built.graph else None
    _check_same_parameters(plan, model, file.path)
    _check_same_modules(plan, model, file.path)
    traced = _Traced.of(file, plan.model, plan.graph, plan.arrangement.precision, cache)
    split = split_of(plan, modules, partial(_on_other_lengths, traced), parts)
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
    """A key of lru_cache for a traced model: its file, arguments and precision."""

    path: Path
    facts: Model
    precision: Precision
    fixed_batch: int | None
    graph: Graph = field(compare=False)
    file: ModelFile = field(compare=False)
    cache: Cache = field(compare=False)

    @classmethod
    def of(
        cls, file: ModelFile, facts: Model, graph: Graph, precision: Precision, cache: Cache
    ) -> _Traced:
        """Return the key of a model."""
        return cls(
            path=file.path,
            facts=facts,
            precision=precision,
            fixed_batch=graph.fixed_batch,
            graph=graph,
            file=file,
            cache=cache,
        )


def _on_other_lengths(model: _Traced) -> Graph | None:
    """Return the model's graph for rows of other lengths, or None if none fits the plan."""
    other = _traced_on_other_lengths(model)
    is_alike = other is not None and other.tensors.keys() == model.graph.tensors.keys()
    return other if is_alike else None  # an edited plan.json has other tensors


@lru_cache(maxsize=16)
def _traced_on_other_lengths(model: _Traced) -> Graph | None:
    """Trace the model on rows of other lengths, once for all its plans and scripts."""
    question = (model.path, model.facts, model.precision, model.fixed_batch)
    known = lengths_found(model.cache, question)
    if known is not None:
        return known[0]
    # rarely needed, and slow to import
    from autopar.planner.trace import with_other_lengths

    axes = infer_axes(model.graph)
    other = with_other_lengths(model.file, model.graph, axes, model.precision)
    kept = CachedLengths(graph=None if other is None else graph_document(other))
    model.cache.keep(kept, question, model=model.path)
    return other


def lengths_process(question: Question, spec: str, cache: Cache) -> BaseProcess:
    """Start a process that traces a model on rows of other lengths while a plan is searched for.

    The process is a fork, so it has torch and the libraries of the model. It puts the graph into
    the cache, where printing the script looks for it. It first waits 2 s: most searches end
    earlier.
    """
    process = get_context("fork").Process(
        target=_trace_other_lengths, args=(question, spec, cache), daemon=True
    )
    process.start()
    return process


_SHORT_SEARCH_SECONDS = 2.0


def _trace_other_lengths(question: Question, spec: str, cache: Cache) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the search, which ends this process
    time.sleep(_SHORT_SEARCH_SECONDS)
    sink = StringIO()
    with suppress(Exception), redirect_stdout(sink), redirect_stderr(sink), DATA_READS.watched():
        known = question.find(cache)
        if known is not None:
            file, traced = load_model_file(spec, question.arguments), with_spec(known, spec)
            _traced_on_other_lengths(
                _Traced.of(file, traced.model, traced.graph, question.precision, cache)
            )


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
                fix="plan again with `autopar plan`, or restore what it reads",
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


def evaluation_notes(subject: PlannedSubject) -> Iterator[str]:
    """Yield notes on how evaluations differ from those of the model in one process."""
    opened, modules = subject.opened, subject.modules
    paths = {path for one in opened.classes for path in one.instances}
    paths |= {subject.graph.calls[call].path for call in opened.inlined}
    paths |= {""} if opened.stages else set()
    found = (modules[path] for path in paths if path in modules)
    names = sorted({one.class_name for one in found if one.branches_in_training})
    yield from absent_notes(subject)
    if names:
        yield (
            f"evaluations run {', '.join(names)} as in training (without dropout, batch norms with "
            "running statistics): the model's forward has `if self.training`, and the forward "
            "printed here has only the branch for training."
        )


def absent_notes(subject: PlannedSubject) -> Iterator[str]:
    """Yield a note on the model's outputs that metrics() cannot use, if there are any."""
    if subject.opened.absent:
        yield (
            f"metrics() cannot use {', '.join(subject.opened.absent)}. A forward printed in a "
            "script computes only outputs that the loss reads, and returns them only in tuples, "
            "dicts, dataclasses and namedtuples."
        )
