"""Prices ops that only move bytes: by each kernel's bytes and its share of the bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.ops.case import OpCase, OpSeconds, moved_bytes
from autopar.planner.graph.graph import Graph
from autopar.planner.precision import Float8
from autopar.planner.rules.rule import Linear, OpKind, Traffic
from autopar.planner.rules.table import rule_of


class MovedBytes(NamedTuple):
    """The bytes that a kernel moves, and the share of a streaming kernel's bandwidth it reaches."""

    bytes: int
    access: float = 1.0


def traffic_seconds(case: OpCase) -> OpSeconds:
    """Return the seconds of an op that reads its inputs and writes its results.

    Views move nothing. If the op computes an exponential per element, the rate of exponentials may
    be the limit (on a CPU).
    """
    learns_weights_only = bool(case.op.inputs) and all(
        case.is_weight(name) for name in case.op.inputs if case.needs_gradient(name)
    )
    forward = _kernel_seconds(case, MovedBytes(forward_bytes(case), _access(case)))
    if not case.needs_gradient(case.result):
        return OpSeconds(forward=forward)
    backward = sum(_kernel_seconds(case, moved) for moved in _backward_kernels(case))
    if learns_weights_only:
        return OpSeconds(forward=forward, weight_gradient=backward)
    return OpSeconds(forward=forward, input_gradient=backward)


def forward_bytes(case: OpCase) -> int:
    """Return the bytes that the forward reads and writes."""
    return moved_bytes(case.op, case.graph, case.bytes)


def _kernel_seconds(case: OpCase, moved: MovedBytes) -> float:
    if not moved.bytes:
        return 0.0
    seconds = memory_seconds(moved.bytes, rates=case.memory, access=moved.access)
    if case.rule.kind is not OpKind.EXPONENTIAL:
        return seconds
    rate = case.memory.exponentials_per_second
    return max(seconds, case.memory.launch_seconds + case.shapes.numel(case.result) / rate)


def _access(case: OpCase) -> float:
    """Return the share of the bandwidth that the forward reaches.

    PyTorch has vectorised kernels for whole contiguous tensors of one type. An operand that is
    broadcast or a part of a tensor needs an offset for each element, and another type a cast. A
    cast to 16 bits has a vectorised kernel.
    """
    access, inputs = case.memory.access, case.op.inputs
    if case.rule.kind is OpKind.JOIN:
        return access.strided_join if any(_is_strided(case, one) for one in inputs) else 1.0
    if not case.rule.is_elementwise:
        return 1.0
    size = case.shapes.numel(case.result)
    if any(case.shapes.numel(one) < size or _is_part(case, one) for one in inputs):
        return access.strided
    is_cast = any(_is_narrower_than(case, one, case.result) for one in inputs)
    return access.casting if is_cast else 1.0


def _is_narrower_than(case: OpCase, name: str, other: str) -> bool:
    """Whether a tensor has floats of 16 bits, and the other one has wider elements."""
    is_half = not case.graph.tensors[name].is_whole_numbered and case.element_bytes(name) == 2
    return is_half and case.element_bytes(other) > 2


def _is_part(case: OpCase, name: str) -> bool:
    """Whether a tensor is a part of a larger one."""
    tensors, batch = case.graph.tensors, case.shapes.batch
    storage = tensors[tensors[name].storage]
    return tensors[name].expected_numel(batch) < storage.expected_numel(batch)


def _is_strided(case: OpCase, name: str) -> bool:
    return case.graph.tensors[name].storage != name and (
        _is_part(case, name) or is_permuted(case.graph, name)
    )


def is_permuted(graph: Graph, name: str) -> bool:
    """Whether a tensor is a view of another one, with its dims in another order."""
    made_by = graph.index.made_by
    while (op := made_by.get(name)) and (rule := rule_of(op.target)).traffic is Traffic.NONE:
        if rule.permutes:
            return True
        if not op.inputs or graph.tensors[name].storage == name:
            return False
        name = op.inputs[0]
    return False


def _backward_kernels(case: OpCase) -> Iterator[MovedBytes]:
    """Yield what each kernel of the backward moves.

    Most ops have one kernel. An elementwise product has one for each factor that needs a gradient:
    it reads the gradient of the result and the other factors, and writes as many bytes as the
    result has. A factor that was broadcast has a second kernel, a sum over rows. The gradients of
    parts are joined, those of `unbind` stacked. If `unbind` reads a permuted tensor, the whole
    gradient is copied back into the order of the tensor's memory.
    """
    access, kind = case.memory.access, case.rule.kind
    if kind is OpKind.MULTIPLICATION:
        yield from _factors(case)
    elif kind in (OpKind.ADDITION, OpKind.SUBTRACTION):
        yield MovedBytes(backward_bytes(case), access.row_sum)
    elif kind in (OpKind.PART, OpKind.PARTS) and len(case.op.outputs) > 1:
        permuted = is_permuted(case.graph, case.op.inputs[0])
        yield MovedBytes(backward_bytes(case), access.strided_join if permuted else 1.0)
        if permuted and kind is OpKind.PART:
            yield MovedBytes(backward_bytes(case), access.strided)
    elif kind is OpKind.CAST:
        gets_half = _is_narrower_than(case, case.result, case.op.inputs[0])
        yield MovedBytes(backward_bytes(case), access.casting if gets_half else 1.0)
    else:
        yield MovedBytes(backward_bytes(case), _access(case))


def _factors(case: OpCase) -> Iterator[MovedBytes]:
    result, access = sum(map(case.bytes, case.op.outputs)), case.memory.access
    size = case.shapes.numel(case.result)
    for place, name in enumerate(case.op.inputs):
        if case.needs_gradient(name):
            others = [*case.op.inputs[:place], *case.op.inputs[place + 1 :]]
            is_broadcast = any(case.shapes.numel(other) < size for other in others)
            moved = result + sum(map(case.bytes, others)) + result
            yield MovedBytes(moved, access.strided if is_broadcast else 1.0)
            if case.shapes.numel(name) < size:
                yield MovedBytes(result + case.bytes(name), access.row_sum)


def backward_bytes(case: OpCase) -> int:
    """Return the bytes that the backward moves, if it is one kernel.

    An addition passes its gradient on, summed where an input was broadcast. A linear op reads
    output gradients and writes input gradients. Any other op also reads what it kept, which is at
    most its inputs and results. The gradient of a slice is written into zeros. The gradients of
    joined tensors are views of the gradient of the whole.
    """
    results = sum(map(case.bytes, case.op.outputs))
    inputs = sum(case.bytes(name) for name in case.op.inputs if case.needs_gradient(name))
    kind = case.rule.kind
    if kind in (OpKind.ADDITION, OpKind.SUBTRACTION):
        size = case.shapes.numel(case.result)
        shrunk = [n for n in case.op.inputs if case.needs_gradient(n)
                  and case.shapes.numel(n) < size]  # fmt: skip
        return sum(results + case.bytes(name) for name in shrunk)
    if kind is OpKind.PARTS or (kind is OpKind.PART and len(case.op.outputs) > 1):
        return 2 * inputs
    if kind is OpKind.JOIN:
        return 0
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


def cast_seconds(case: OpCase) -> OpSeconds:
    """Return the seconds of kernels that cast the factors of a linear layer to float8.

    `CastBytes` lists the bytes that they move per element. Leaves out that products read scales,
    and that a kernel which makes a factor may also find its largest element.
    """
    if case.float8 is Float8.NONE:
        return OpSeconds(forward=0.0)
    moved, (source, weight) = case.float8.casts, map(case.shapes.numel, case.op.inputs[:2])
    own = source if case.casts_input else 0  # otherwise another product of the layer casts it
    forward = moved.weight * weight + moved.source * own
    backward = (
        *(moved.result_gradient * case.shapes.numel(case.result), moved.source_again * own),
        *(moved.weight_again * weight, moved.scaled_gradient * source),
    )
    return OpSeconds(
        forward=memory_seconds(forward, rates=case.memory),
        input_gradient=memory_seconds(sum(backward), rates=case.memory),
        weight_gradient=memory_seconds(moved.scaled_gradient * weight, rates=case.memory)
        if moved.scaled_gradient
        else 0.0,
    )
