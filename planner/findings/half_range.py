"""Refuses what a model computes in fp16 that fp16 cannot hold."""

from __future__ import annotations

from math import isfinite

from autopar.planner.errors import InputError
from autopar.planner.graph import Graph
from autopar.planner.ops import MODEL_DTYPE, MODEL_EXTREMES, Op
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of

GREATEST = 65_504
_VALUES = ("value", "fill_value")


def check_constants(graph: Graph) -> None:
    """Refuse what fills a tensor of the model's type with a number beyond fp16: torch raises."""
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
    """Refuse a loss over more targets than fp16 can count: torch makes its gradient zero.

    torch keeps the number of targets, which it divides by, in the type of the logits. Those of a
    loss function are float32; a loss that the model returns may have them in fp16.
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
