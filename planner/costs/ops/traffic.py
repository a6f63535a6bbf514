"""Turns an op that is bound by the bytes it moves into seconds: all that have no own formula."""

from __future__ import annotations

from collections.abc import Callable

from autopar.planner.costs.kernels.elementwise import memory_seconds
from autopar.planner.costs.ops.case import OpCase, Seconds
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, refs
from autopar.planner.rules.rule import Linear, OpKind, Traffic
from autopar.planner.rules.table import rule_of


def traffic_seconds(case: OpCase) -> Seconds:
    """Return the seconds of one kernel that moves an op's inputs and results.

    Views move nothing. Where the result takes an exponential per element, its rate may bind (on a
    CPU). Leaves out strided access.
    """
    is_learned = bool(case.op.inputs) and all(
        case.is_weight(name) for name in case.op.inputs if case.needs_gradient(name)
    )
    forward = _kernel(case, forward_bytes(case))
    if not case.needs_gradient(case.result):
        return Seconds(forward=forward)
    backward = _kernel(case, backward_bytes(case))
    if is_learned:
        return Seconds(forward=forward, weight_gradient=backward)
    return Seconds(forward=forward, input_gradient=backward)


def forward_bytes(case: OpCase) -> int:
    """Return what the forward reads and writes."""
    return moved_bytes(case.op, case.graph, case.bytes)


def moved_bytes(op: Op, graph: Graph, size: Callable[[str], int]) -> int:
    """Return what an op reads and writes of tensors of these sizes.

    A gather reads as much of a table as it writes; bags read so many rows more as they hold.
    """
    rule, written = rule_of(op.target), sum(map(size, op.outputs))
    if rule.traffic is Traffic.BAGGED:
        ids, bags = (sum(map(size, refs(op.argument(key)))) for key in ("indices", "offsets"))
        return written + ids + size(op.outputs[0]) * ids // max(bags, 1)
    if rule.traffic is Traffic.NONE:
        copied = graph.tensors[op.outputs[0]].storage == op.outputs[0]
        return 2 * written if copied and rule.kind is OpKind.CONTIGUOUS else 0
    return written + (written if rule.traffic is Traffic.GATHERED else sum(map(size, op.inputs)))


def backward_bytes(case: OpCase) -> int:
    """Return what the backward moves.

    A sum hands its gradient on, summed where an input was broadcast. What is linear reads the
    results' gradient and writes the inputs'; what is not also reads what it kept, at most its
    inputs and results. The gradient of a part of a tensor is written into zeros.
    """
    results = sum(map(case.bytes, case.op.outputs))
    inputs = sum(case.bytes(name) for name in case.op.inputs if case.needs_gradient(name))
    kind = case.rule.kind
    if kind in (OpKind.ADDITION, OpKind.SUBTRACTION):
        size = case.shapes.numel(case.result)
        shrunk = [n for n in case.op.inputs if case.needs_gradient(n)
                  and case.shapes.numel(n) < size]  # fmt: skip
        return sum(results + case.bytes(name) for name in shrunk)
    if kind is OpKind.PARTS:
        return 2 * inputs
    if kind is OpKind.PART:
        return inputs + 2 * results if results < inputs else 0
    if kind is OpKind.EXPAND:
        return results + inputs if inputs < results else 0
    if case.rule.traffic is Traffic.NONE:
        return forward_bytes(case)
    if case.rule.traffic is Traffic.GATHERED:
        return inputs + 2 * results
    if case.rule.linear in (Linear.FIRST, Linear.JOINTLY):
        return results + inputs
    return forward_bytes(case) + inputs


def _kernel(case: OpCase, moved: int) -> float:
    if not moved:
        return 0.0
    seconds = memory_seconds(moved, rates=case.memory)
    if case.rule.kind is not OpKind.EXPONENTIAL:
        return seconds
    rate = case.memory.exponentials_per_second
    return max(seconds, case.memory.launch_seconds + case.shapes.numel(case.result) / rate)
