"""Prints how many targets of a batch count in the mean of the loss: sliced from the graph."""

from __future__ import annotations

from dataclasses import replace

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.calls import LOSS, CallTree
from autopar.codegen.forward.changes import LOSSES
from autopar.codegen.forward.expressions import Level, binary, method
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
    """Return the source of `valid_targets(batch)`, or None where the loss is no such mean."""
    graph = split.graph
    loss = counted_loss(graph)
    if loss is None:
        return None
    target = loss.argument("target")
    assert isinstance(target, Ref)
    steps = _slice(graph, tree, target.tensor)
    if steps is None:
        return None
    calls = {call for op in steps for call in tree.chain(op)} - {LOSS}
    whole = replace(split, degree=1, ops={}, gives={}, crossing={})
    opening = open_calls(whole, tree, opened=[LOSS], inlined=sorted(calls))
    builder = BodyBuilder(opening, LOSS)
    bind_batch(builder)
    for op in steps:
        if base_name(op.target) in _MOVES:
            builder.alias(op)
        else:
            builder.add(op)
    ignored = loss.argument("ignore_index")
    assert isinstance(ignored, int)
    counted = builder.value(target.tensor, WHOLE)
    body = builder.body(method(binary(counted, "!=", literal(ignored), Level.COMPARISON), "sum"))
    typed = frozenset(builder.arguments.values())
    style = Style(typed=typed, returns="Tensor", axis="", indent=4)
    return (
        "\n".join(
            [
                "def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:",
                '    """Return how many targets of the batch count in the mean of the loss."""',
                *written(body, builder.owner, style),
            ]
        )
        + "\n"
    )


def counted_loss(graph: Graph) -> Op | None:
    """Return the op that is the loss, where it is a mean over the targets that are not ignored."""
    maker = next((op for op in graph.ops if graph.loss in op.outputs), None)
    if maker is None or maker.target not in LOSSES or maker.argument("reduction") != 1:
        return None
    target = maker.argument("target")
    assert isinstance(target, Ref)
    is_class = not graph.tensors[target.tensor].dtype.startswith(("float", "bfloat", "model"))
    return maker if is_class and maker.argument("weight") is None else None


def _slice(graph: Graph, tree: CallTree, target: str) -> list[Op] | None:
    """Return the ops that make the targets from the batch, None where a parameter is in them."""
    needed, steps = {target}, list[Op]()
    for op in reversed(graph.ops):
        if needed & set(op.outputs):
            steps.append(op)
            needed |= set(op.inputs)
    origins = {graph.tensors[name].origin for name in needed}
    del tree
    return None if origins & {Origin.PARAMETER, Origin.BUFFER} else steps[::-1]
