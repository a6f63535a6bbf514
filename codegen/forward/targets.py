"""Prints how many targets of a batch count in the mean of the loss: sliced from the graph."""

from __future__ import annotations

from collections.abc import Sequence
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
from autopar.planner.graph import Graph, Op, Origin, Ref
from autopar.planner.layouts import WHOLE

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
    means where the loss adds several terms up.
    """
    graph = split.graph
    loss = counted_loss(graph)
    terms = [loss] if loss is not None else [op for op in graph.ops if op.name in split.weighed]
    steps = _slice(graph, [_target(term) for term in terms])
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
    counts = [_count(term, builder) for term in terms]
    result = counts[0] if loss is not None else call("torch.stack", joined(tuple(counts)))
    typed = frozenset(builder.arguments.values())
    style = Style(typed=typed, returns="Tensor", axis="", indent=4)
    return (
        "\n".join(
            [
                "def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:",
                '    """Return how many targets of the batch count in the mean of the loss."""',
                *written(builder.body(result), builder.owner, style),
            ]
        )
        + "\n"
    )


def _count(term: Op, builder: BodyBuilder) -> Expression:
    ignored = term.argument("ignore_index")
    assert isinstance(ignored, int)
    counted = builder.value(_target(term), WHOLE)
    return method(binary(counted, "!=", literal(ignored), Level.COMPARISON), "sum")


def counted_loss(graph: Graph) -> Op | None:
    """Return the op that is the loss, where it is a mean over the targets that are not ignored."""
    maker = next((op for op in graph.ops if graph.loss in op.outputs), None)
    return maker if maker is not None and _is_counted(maker, graph) else None


def weighed_terms(graph: Graph) -> tuple[Op, ...]:
    """Return the means over targets that count, where the loss is more than one of them."""
    if counted_loss(graph) is not None:
        return ()
    found = [op for op in graph.ops if _is_counted(op, graph)]
    return tuple(op for op in found if _slice(graph, [_target(op)]) is not None)


def _is_counted(op: Op, graph: Graph) -> bool:
    if op.target not in LOSSES or op.argument("reduction") != 1:
        return False
    is_class = not graph.tensors[_target(op)].dtype.startswith(("float", "bfloat", "model"))
    return is_class and op.argument("weight") is None


def _target(op: Op) -> str:
    target = op.argument("target")
    assert isinstance(target, Ref)
    return target.tensor


def _slice(graph: Graph, targets: Sequence[str]) -> list[Op] | None:
    """Return the ops that make the targets from the batch, None where a parameter is in them."""
    needed, steps = set(targets), list[Op]()
    for op in reversed(graph.ops):
        if needed & set(op.outputs):
            steps.append(op)
            needed |= set(op.inputs)
    origins = {graph.tensors[name].origin for name in needed}
    return None if origins & {Origin.PARAMETER, Origin.BUFFER} else steps[::-1]
