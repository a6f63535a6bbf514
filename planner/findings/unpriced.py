"""Finds the ops whose FLOPs nobody knows though they weigh: a plan says so, and counts no zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.planner.annotate import annotate
from autopar.planner.axes.infer import Axes
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Origin
from autopar.planner.precision import Precision
from autopar.planner.rules.table import has_line

LARGE = 0.05  # of the bytes that a step moves: what is priced by less of them hardly shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced:
    """Ops of one kind that the table has no line for, with their share of all bytes moved."""

    target: str
    count: int
    location: str
    share: float


def unpriced(graph: Graph, axes: Axes) -> Iterator[Unpriced]:
    """Yield the kinds of ops without a formula that multiply by a parameter, or move much."""
    kinds: dict[str, list[Op]] = {}
    for op in graph.ops:
        if not has_line(op.target):
            kinds.setdefault(op.target, []).append(op)
    if not kinds:
        return
    done = annotate(graph, axes, batch=graph.fixed_batch or 1, precision=Precision.FP32)
    moved = {name: work.forward_bytes + work.backward_bytes for name, work in done.ops.items()}
    total = max(1, sum(moved.values()))
    for target, ops in kinds.items():
        share = sum(moved[op.name] for op in ops) / total
        if share >= LARGE or any(_reads_parameter(op, graph) for op in ops):
            yield Unpriced(target=target, count=len(ops), location=ops[0].location, share=share)


def _reads_parameter(op: Op, graph: Graph) -> bool:
    roots = graph.index.storages(op.inputs)
    return any(graph.tensors[root].origin is Origin.PARAMETER for root in roots)
