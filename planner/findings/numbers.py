"""Finds ops without a price, and numbers that fp16 cannot represent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from autopar.planner.annotate import annotate
from autopar.planner.axes.infer import GraphAxes
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import MODEL_DTYPE, MODEL_EXTREMES, Op, TensorOrigin
from autopar.planner.precision import Precision
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import has_line, kind_of

LARGE = 0.05  # of the bytes of a step: a smaller share hardly matters


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced:
    """Ops of one kind without a formula, with their share of all moved bytes."""

    target: str
    count: int
    location: str
    share: float


def unpriced(graph: Graph, axes: GraphAxes) -> Iterator[Unpriced]:
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
    return any(graph.tensors[root].origin is TensorOrigin.PARAMETER for root in roots)


GREATEST = 65_504
_VALUES = ("value", "fill_value")


def check_constants(graph: Graph) -> None:
    """Raise if a tensor in the model's dtype is filled with a number beyond fp16."""
    for op in graph.ops:
        if kind_of(op) is OpKind.FILL and _is_narrow(op, graph):
            for key, value in op.arguments:
                if key in _VALUES and _overflows(value):
                    raise InputError(
                        f"{value:g} does not fit fp16, which ends at {GREATEST:,}",
                        where=op.location,
                        fix='write float("-inf") or torch.finfo(x.dtype).min, or plan in bf16',
                    )


def check_means(graph: Graph, *, microbatch: int) -> None:
    """Raise if a loss averages over more targets than fp16 can count: its gradient would be 0.

    torch keeps the number of targets, by which it divides, in the logits' dtype. A loss function
    gets float32 logits; a loss computed by the model may have fp16.
    """
    for op in graph.ops:
        if kind_of(op).is_class_loss and _is_narrow(op, graph):
            target = op.inputs[1]
            count = graph.tensors[target].numel.at(microbatch)
            if count > GREATEST:
                raise InputError(
                    f"the loss is a mean over {count:,} targets of a microbatch of {microbatch} "
                    f"rows, and fp16 counts to {GREATEST:,}",
                    where=op.location,
                    fix="compute the loss from logits.float(), pin a smaller microbatch, or plan "
                    "in bf16",
                )


def _is_narrow(op: Op, graph: Graph) -> bool:
    return graph.tensors[op.outputs[0]].dtype == MODEL_DTYPE


def _overflows(value: object) -> bool:
    if not isinstance(value, (int, float)) or abs(value) in MODEL_EXTREMES:
        return False
    return isfinite(value) and abs(value) > GREATEST
