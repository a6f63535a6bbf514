"""Prints by how much a batch counts in the mean of the loss: sliced from the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.calls import LOSS, CallTree
from autopar.codegen.forward.changes import LOSSES
from autopar.codegen.forward.expressions import (
    Expression,
    Level,
    binary,
    call,
    joined,
    method,
)
from autopar.codegen.forward.literals import literal
from autopar.codegen.forward.losses import bind_batch
from autopar.codegen.forward.opening import open_calls
from autopar.codegen.forward.operations import base_name
from autopar.codegen.forward.split import Split
from autopar.codegen.forward.writer import Style, written
from autopar.planner.graph import Graph, Op, Ref
from autopar.planner.layouts import WHOLE
from autopar.planner.loss_of_parts import (
    Follows,
    all_of_parts,
    steps_from_batch,
    weighing_count,
)

_BY_TARGETS = LOSSES | {"aten.nll_loss.default", "aten.nll_loss_nd.default"}

# Ops that move targets without changing how many of each there are.
_MOVES = frozenset(
    {
        "flatten", "view", "reshape", "contiguous", "transpose", "permute", "unsqueeze", "squeeze",
        "clone", "t", "to", "_unsafe_view",
    }
)  # fmt: skip


def valid_targets(split: Split, tree: CallTree) -> str | None:
    """Return the source of `valid_targets(batch)`, or None where the loss has no such mean.

    It gives the number of targets of a loss that is one mean, and the numbers of all the weighed
    means where the loss adds several terms up; where a mean divides by a number of its own, that.
    """
    graph = split.graph
    loss = counted_loss(graph)
    terms = [loss] if loss is not None else [op for op in graph.ops if op.name in split.weighed]
    numbers = _numbers(graph, terms)
    steps = steps_from_batch(graph, list(numbers.values()))
    if not terms or steps is None:
        return None
    calls = {call for op in steps for call in tree.chain(op)} - {LOSS}
    whole = replace(split, degree=1, ops={}, gives={}, crossing={}, weighed=())
    opening = open_calls(whole, tree, opened=[LOSS], inlined=sorted(calls))
    builder = BodyBuilder(opening, LOSS)
    bind_batch(builder)
    for op in steps:
        if base_name(op.target) in _MOVES:
            builder.alias(op)
        else:
            builder.add(op)
    counts = [_count(term, numbers[term.name], builder) for term in terms]
    result = counts[0] if loss is not None else call("torch.stack", joined(tuple(counts)))
    typed = frozenset(builder.arguments.values())
    style = Style(typed=typed, returns="Tensor", axis="", indent=4)
    return (
        "\n".join(
            [
                "def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:",
                '    """Return how much of the batch counts in the mean of the loss."""',
                *written(builder.body(result), builder.owner, style),
            ]
        )
        + "\n"
    )


def _count(term: Op, number: str, builder: BodyBuilder) -> Expression:
    counted = builder.value(number, WHOLE)
    if term.target not in _BY_TARGETS:
        return counted
    ignored = term.argument("ignore_index")
    assert isinstance(ignored, int)
    return method(binary(counted, "!=", literal(ignored), Level.COMPARISON), "sum")


def counted_loss(graph: Graph) -> Op | None:
    """Return the op that is the loss, where it is a mean over what counts of the batch."""
    maker = next((op for op in graph.ops if graph.loss in op.outputs), None)
    return maker if maker is not None and _numbers(graph, [maker]) else None


def weighed_terms(graph: Graph) -> tuple[Op, ...]:
    """Return the means over what counts of the batch, where the loss is more than one of them."""
    if counted_loss(graph) is not None:
        return ()
    numbers = _numbers(graph, graph.ops)
    found = [op for op in graph.ops if op.name in numbers]
    return tuple(op for op in found if steps_from_batch(graph, [numbers[op.name]]) is not None)


def _numbers(graph: Graph, ops: Iterable[Op]) -> dict[str, str]:
    """Return, for each op that is a mean, the targets or the number that it counts by."""
    follows = all_of_parts(graph)
    pairs = ((op.name, _number(op, graph, follows)) for op in ops)
    return {name: number for name, number in pairs if number}


def _number(op: Op, graph: Graph, follows: Mapping[str, Follows]) -> str:
    if op.target not in _BY_TARGETS:
        return weighing_count(graph, op, follows)
    target = op.argument("target")
    assert isinstance(target, Ref)
    is_class = not graph.tensors[target.tensor].dtype.startswith(("float", "bfloat", "model"))
    is_counted = is_class and op.argument("reduction") == 1 and op.argument("weight") is None
    return target.tensor if is_counted else ""
