"""Runs scripts whose layers are compiled, and counts what torch.compile makes of them."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.utils import counters

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import RankTrained, compared
from autopar.codegen.proof.plain import task_of
from autopar.codegen.proof.script_rank import NAME, StepRecorder, run_script
from autopar.codegen.proof.verification import axes_of
from autopar.planner.axes.infer import infer_axes
from autopar.planner.errors import AutoparError
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Compile, Layer, compiled_ops, find_layers
from autopar.planner.plan.plan import Plan
from tests.codegen.normed_apart import parts_normed, train_normed_apart
from tests.field.cells import Kind, Subject
from tests.field.trial import STEPS, TOLERANCE, cause_of, plan_of
from tests.runtime.processes import run_on_ranks

PATIENCE_SECONDS = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilations:
    """What torch.compile did on one rank."""

    graphs: tuple[int, ...]  # compiled in each step
    breaks: tuple[str, ...]  # why it left a layer's code
    warned: tuple[str, ...]  # what a user would see of it
    cpu_seconds: float

    @property
    def again(self) -> int:
        """Graphs that were compiled after the second step."""
        return sum(self.graphs[2:])


def run_compiled(
    path: str, arguments: Sequence[str], backend: str
) -> tuple[RankTrained, Compilations]:
    """Run a script's main with a backend of torch.compile, and count what it compiles."""
    with counted(backend) as told:
        trained = run_script(path, arguments)
    return trained, told()


@contextmanager
def counted(backend: str) -> Iterator[Callable[[], Compilations]]:
    """Compile by a backend inside, and count graphs step by step."""
    torch._dynamo.reset()
    counters.clear()
    symbolic_convert._import_module.cache_clear()
    for module in list(sys.modules.values()):  # dynamo would find an earlier script of this process
        if isinstance(module, ModuleType):
            vars(module).pop(f"__import_{NAME}", None)
    graphs: list[int] = []
    began = time.process_time()
    stepped = StepRecorder.stepped

    def watched(self: StepRecorder, step: Callable[..., Any], dtype: torch.dtype) -> Any:
        run = stepped(self, step, dtype)

        def one(*args: Any, **kwargs: Any) -> Any:
            before = counters["stats"]["unique_graphs"]
            made = run(*args, **kwargs)
            graphs.append(counters["stats"]["unique_graphs"] - before)
            return made

        return one

    with (
        patch.object(torch, "compile", partial(torch.compile, backend=backend)),
        patch.object(StepRecorder, "stepped", watched),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("default")
        yield lambda: Compilations(
            graphs=tuple(graphs),
            breaks=tuple(counters["graph_break"]),
            warned=tuple(str(one.message) for one in seen),
            cpu_seconds=time.process_time() - began,
        )


def compiled_ranks(
    plan: Plan, *, steps: int, dtype: str, backend: str
) -> list[tuple[RankTrained, Compilations]]:
    """Emit the script of a plan, and run it on so many ranks."""
    arguments = ["--steps", str(steps), "--dtype", dtype, "--log-every", "1"]
    arguments += ["--data", "dataset"] if plan.model.has_dataset else []
    with TemporaryDirectory(prefix="script-") as folder:
        path = write_script(plan, Path(folder))
        return run_on_ranks(
            run_compiled, plan.arrangement.ranks, str(path), arguments, backend,
            timeout_seconds=PATIENCE_SECONDS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCell:
    """What became of one model under one kind of plan."""

    verdict: str  # equal, refused, wrong
    detail: str
    ranks: tuple[Compilations, ...] = ()
    eager: tuple[str, ...] = ()  # layers that are not compiled, and why


def eager_layers(graph: Graph) -> tuple[str, ...]:
    """Return the classes of layers that torch.compile does not get, each with the reason."""
    layers = find_layers(graph, infer_axes(graph)).layers
    counts = Counter(_why_eager(one, graph) for one in layers if not compiled_ops(one, graph))
    return tuple(f"{count} × {text}" for text, count in counts.items())


def _why_eager(layer: Layer, graph: Graph) -> str:
    call = graph.calls.get(layer.call)
    if call is None or not call.path:
        return "ops outside of modules"
    is_broken = call.path in graph.broken
    return f"{call.class_name}: {'a line breaks graphs' if is_broken else 'one op, none to fuse'}"


# In float32 only losses are compared, relative to their scale: Adam blows up gradients near zero.
TOLERANCES = {"float64": TOLERANCE, "float32": 1e-5}


def compiled_cell(
    subject: Subject, kind: Kind, backend: str, dtype: str = "float64"
) -> CompiledCell:
    """Plan, emit and train one cell; every failure is a result."""
    try:
        plan = plan_of(subject, kind)
        assert plan.arrangement.compile is Compile.LAYERS
        task = task_of(plan, plan.model.spec, steps=STEPS, uses_dataset=True, dtype=dtype)
        parts = parts_normed(plan)
        (alone,) = run_on_ranks(
            train_normed_apart, 1, task, parts, timeout_seconds=PATIENCE_SECONDS
        )
        found = compiled_ranks(plan, steps=STEPS, dtype=dtype, backend=backend)
        worst = compared([one for one, _ in found], alone, axes_of(plan))
    except AutoparError as refusal:
        return CompiledCell(verdict="refused", detail=refusal.found)
    except Exception as failure:
        return CompiledCell(verdict="wrong", detail=cause_of(failure))
    ranks = tuple(one for _, one in found)
    if worst.faults:
        return CompiledCell(verdict="wrong", detail=" · ".join(worst.faults), ranks=ranks)
    scale = max(map(abs, worst.losses))
    loss = replace(worst.loss, largest=worst.loss.largest / scale)
    exact = (worst.loss, worst.norm, worst.gradient, worst.parameter)
    largest = max(
        (loss,) if dtype == "float32" else exact,
        key=lambda one: (one.largest != one.largest, one.largest),
    )
    is_equal = largest.largest <= TOLERANCES[dtype]
    name = "" if is_equal else f" {largest.name}"
    return CompiledCell(
        verdict="equal" if is_equal else "wrong",
        detail=f"{largest.largest:.1e}{name}",
        ranks=ranks,
        eager=eager_layers(plan.graph),
    )
