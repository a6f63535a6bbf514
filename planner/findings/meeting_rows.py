"""Finds where the rows of a batch meet: there a training split over its rows has another loss."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.planner.extent import BATCH
from autopar.planner.findings.grouped_rows import grouped_rows
from autopar.planner.findings.loss_of_parts import Follows, all_of_parts, loss_of_parts
from autopar.planner.findings.row_numbers import counts_rows
from autopar.planner.findings.steady_buffers import written_buffers
from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, takes_statistics

_ALONG = (OpKind.ALONG, OpKind.SOFTMAX, OpKind.SORT)
_TAKING = (OpKind.PART, OpKind.PARTS)


def meeting_rows(graph: Graph) -> Op | None:
    """Return the first op that reads all rows at once, for the loss or for a buffer.

    It compares every pair of rows, as contrastive losses do, or a row with the next one, or the
    first half with the second; gives rows what all of them have made, as centering does; or
    computes with their number; or makes of the rows' mean or sum what is no mean of that of their
    parts, as a root does; or normalises them by their statistics without being one of torch's batch
    norms, which share theirs over all ranks. A buffer may keep what was made of all rows.
    """
    of_parts, grouped = all_of_parts(graph), grouped_rows(graph)
    for op in graph.ops:
        if op.name in grouped:
            continue
        if any(by(op, graph) for by in _MEETING):
            return op
        if any(by(op, graph, of_parts) for by in (_shares, _counts, _keeps)):
            return op
    return loss_of_parts(graph).op if of_parts[graph.loss] is Follows.MEETS else None


def _compares_rows(op: Op, graph: Graph) -> bool:
    """Whether an op makes a number for every pair of rows."""
    return any(_varying(graph, name) > 1 for name in op.outputs)


def _shares(op: Op, graph: Graph, of_parts: Mapping[str, Follows]) -> bool:
    """Whether an op gives rows what was made of all of them together.

    The gradient of a sum over rows is that of each row; that of a mean has their number in it.
    """
    if kind_of(op) is OpKind.GRADIENT and _is_of_sum(op, of_parts):
        return False
    is_shared = any(of_parts[name] not in (Follows.ALIKE, Follows.ROWS) for name in op.inputs)
    return is_shared and any(_varying(graph, name) for name in (*op.inputs, *op.outputs))


def _is_of_sum(op: Op, of_parts: Mapping[str, Follows]) -> bool:
    added = (Follows.ALIKE, Follows.ROWS, Follows.SUM)
    return all(of_parts[name] in added for name in op.inputs)


def _counts(op: Op, graph: Graph, of_parts: Mapping[str, Follows]) -> bool:
    """Whether an op computes with the number of rows; of a mean or a sum the loss tells more."""
    del graph
    known = (Follows.MEAN, Follows.SUM)
    return counts_rows(op) and not any(of_parts[name] in known for name in op.inputs)


def _mixes_rows(op: Op, graph: Graph) -> bool:
    """Whether an op works along the rows, or takes some of them by their places."""
    kind = kind_of(op)
    if kind not in _ALONG + _TAKING:
        return False
    shape, arguments = graph.tensors[op.inputs[0]].shape, dict(op.arguments)
    given = arguments.get("dims", arguments.get("dim"))
    dims = given if isinstance(given, tuple) else (given,)
    sizes = [shape[dim] for dim in dims if isinstance(dim, int) and shape]
    if kind in _TAKING:
        return BATCH in sizes and graph.tensors[op.outputs[0]].shape != shape
    return any(not size.is_constant for size in sizes)


def _keeps(op: Op, graph: Graph, of_parts: Mapping[str, Follows]) -> bool:
    """Whether an op writes to a buffer what it has of the rows: each rank would have its own."""
    if kind_of(op) is OpKind.BATCH_NORM:
        return False
    return bool(written_buffers(op, graph)) and any(
        of_parts[name] is not Follows.ALIKE for name in op.inputs
    )


def _counts_all(op: Op, graph: Graph) -> bool:
    """Whether an embedding divides its gradient by how often all rows name an entry."""
    del graph
    return bool(dict(op.arguments).get("scale_grad_by_freq"))


def _normalises_alone(op: Op, graph: Graph) -> bool:
    """Whether an op takes statistics of the rows in a module that is no batch norm of torch's."""
    if not takes_statistics(op) or not _varying(graph, op.inputs[0]):
        return False
    return op.call not in graph.calls or not graph.calls[op.call].is_batch_norm


def _varying(graph: Graph, name: str) -> int:
    """Return how many sizes of a tensor depend on the batch."""
    return sum(not size.is_constant for size in graph.tensors[name].shape)


_MEETING = (_compares_rows, _mixes_rows, _counts_all, _normalises_alone)
