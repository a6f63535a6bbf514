"""Computes a cell of the equality matrix: a zoo model's plan, its script, and one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import Difference, RankTrained, TrainingComparison, compared
from autopar.codegen.proof.plain import Task, TrainedAlone, task_of
from autopar.codegen.proof.verification import axes_of as axes_of_ranks
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import Recompute
from autopar.planner.layers import find_layers
from autopar.planner.plan.declared.constraints import Constraints, RecomputePin, SplitRule
from autopar.planner.plan.plan import Plan, model_facts
from autopar.planner.plan.search.search import search
from autopar.planner.precision import Precision
from tests.codegen.matrix_cells import GLOBAL_BATCH, KINDS, SUBJECTS, Kind, axes_of
from tests.codegen.normed_apart import parts_normed
from tests.codegen.padding import run_padded_script, train_padded_alone
from tests.planner.subjects import ZOO, zoo_file, zoo_graph
from tests.runtime.processes import run_on_ranks
from tests.strict.ranks import run_on_strict_ranks

STEPS = 5
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
DEVICE_BYTES = 16 * 2**30  # with room for the process groups of every kind


@cache
def subject_parts(name: str) -> tuple[Any, ...]:
    """Return graph, axes, layers and facts of a subject."""
    subject = SUBJECTS[name]
    file, graph = (
        zoo_file(subject.file, *subject.arguments),
        zoo_graph(subject.file, *subject.arguments),
    )
    axes = infer_axes(graph)
    spec = str(ZOO / subject.file)
    facts = model_facts(file, graph, spec=spec, arguments=subject.arguments)
    return graph, axes, find_layers(graph, axes), facts


@cache
def plan_of(name: str, kind: str) -> Plan:
    """Return the plan of a cell, or raise what the planner refuses it with."""
    chosen = KINDS[kind]
    graph, axes, layers, facts = subject_parts(name)
    return search(graph, axes, layers, facts, _cluster(chosen.ranks), constraints_of(name, chosen))


def _cluster(ranks: int) -> Cluster:
    cluster = choose_cluster(ranks, "cpu")
    (node,) = cluster.nodes
    device = replace(node.device, memory_bytes=DEVICE_BYTES)
    return replace(cluster, nodes=(replace(node, device=device),))


def constraints_of(name: str, kind: Kind) -> Constraints:
    """Return what makes the planner choose this kind of plan."""
    blocks = SUBJECTS[name].blocks
    return Constraints(
        tolerance=0.0,
        pipeline=kind.pipeline,
        data=kind.data,
        tensor=kind.tensor,
        shard=kind.shard,
        microbatch=kind.microbatch,
        global_batch=GLOBAL_BATCH,
        stages_per_rank=kind.stages_per_rank if kind.pipeline > 1 else None,
        schedules=(kind.schedule,),
        zero_levels=(kind.zero,),
        offloads=(kind.offload,),
        precision=Precision.FP32,
        splits=tuple(
            SplitRule(modules="*", axis=axis, is_required=True)
            for axis in axes_of(SUBJECTS[name], kind)
        ),
        recompute=(
            RecomputePin(modules="*", mode=Recompute.NONE),
            *(RecomputePin(modules=modules, mode=kind.recompute) for modules in blocks),
        ),
    )


def split_axes(name: str, plan: Plan) -> frozenset[str]:
    """Return the names of the axes that a plan splits."""
    _, axes, _, _ = subject_parts(name)
    chosen = (layout.axis for layouts in plan.layouts for layout in layouts)
    return frozenset(axes.names[axis] for axis in chosen if axis)


def compare_cell(name: str, kind: str, *, dtype: str = "float64") -> TrainingComparison:
    """Train a cell by its script, and in one process, and return how far they are apart."""
    plan = plan_of(name, kind)
    task = task_of(plan, plan.model.spec, steps=STEPS, dtype=dtype)
    alone = _alone(name, task, parts_normed(plan))
    return compared(_by_script(name, plan, dtype), alone, axes_of_ranks(plan))


def worst_of(comparison: TrainingComparison, dtype: str) -> Difference:
    """Return the greatest difference to scale; in float32 Adam blows up what is truly zero."""
    if comparison.faults:
        return Difference(largest=float("inf"), name=comparison.faults[0])
    scale = max(map(abs, comparison.losses))
    loss = Difference(largest=comparison.loss.largest / scale, name=comparison.loss.name)
    # Clipped gradients and initial weights are about one, or less.
    exact = (comparison.norm, comparison.gradient, comparison.parameter)
    others = () if dtype == "float32" else exact
    worst: Difference = max(
        (loss, *others), key=lambda one: (one.largest != one.largest, one.largest)
    )
    return worst


def _by_script(name: str, plan: Plan, dtype: str) -> list[RankTrained]:
    """Train by a script on ranks as strict as those of nccl."""
    arguments = ["--steps", str(STEPS), "--dtype", dtype, "--log-every", "1"]
    with TemporaryDirectory(prefix="script-") as folder:
        path = write_script(plan, Path(folder))
        return run_on_strict_ranks(
            run_padded_script,
            plan.arrangement.ranks,
            str(path),
            arguments,
            SUBJECTS[name].padding,
            timeout_seconds=100.0,
        )


@cache
def _alone(name: str, task: Task, parts_normed: int) -> TrainedAlone:
    padding = SUBJECTS[name].padding
    (trained,) = run_on_ranks(train_padded_alone, 1, task, padding, parts_normed)
    return trained
