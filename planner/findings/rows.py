"""Finds ops that mix or reorder rows of a batch, and random numbers that all rows share.

A mixture of experts sorts rows by expert, multiplies each group by its expert's matrix, and puts
every row back in its place. Rows do not affect each other if no op combines a tensor in the order
of a sort with a tensor in another order.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.planner.findings.loss import (
    Follows,
    all_of_parts,
    counts_rows,
    division_of,
    is_weighed_division,
    loss_of_parts,
)
from autopar.planner.findings.places import row_places
from autopar.planner.findings.writes import written_buffers
from autopar.planner.graph.graph import Graph, once_per_graph
from autopar.planner.graph.ops import BATCH, Extent, Op
from autopar.planner.rules.rule import OpKind, is_random
from autopar.planner.rules.table import kind_of, takes_statistics


def norm_of_rows(graph: Graph) -> Op | None:
    """Return the first batch norm in training that takes statistics over the rows of a batch.

    Data ranks can share such statistics, because they normalise at the same time. Microbatches
    cannot: the first one is normalised, and perhaps through its backward, before the next begins.
    """
    for op in graph.ops:
        if takes_statistics(op) and _varying(graph, op.inputs[0]):
            return op
    return None


_NATURAL = ""  # the order of the batch's rows
# Ops on the indices of a sort whose result still counts as indices of its rows: index // k and
# index % k (each row is sorted k times, once for each of its experts), and expanding them.
_KEEPING_INDICES = (OpKind.DIVISION, OpKind.QUOTIENT, OpKind.EXPAND)


def grouped_rows(graph: Graph) -> frozenset[str]:
    """Return the names of the sorts of integers, and of the grouped products, that mix no rows."""
    reader = _OrderReader(graph)
    for op in graph.ops:
        reader.read(op)
    return frozenset(op for op, sort in reader.sorts.items() if sort not in reader.mixed)


class _OrderReader:
    """Finds the order of each tensor's rows: the original one, or that of a sort."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order: dict[str, str] = {}  # tensor → the sort that its rows are ordered by
        self.places: dict[str, str] = {}  # tensor → the sort whose row indices it holds
        self.ways_back: dict[str, str] = {}  # tensor → the sort that indexing by it undoes
        self.sorts: dict[str, str] = {}  # a sort, its inverse, or a grouped product → the sort
        self.mixed: set[str] = set()

    def read(self, op: Op) -> None:
        kind = kind_of(op)
        if kind in (OpKind.SORT, OpKind.ARGSORT) and self._sorts_groups(op):
            self._sort(op)
        elif kind is OpKind.INDEX and len(op.inputs) == 2:
            self._take(op, *op.inputs)
        elif kind is OpKind.WRITE_AT and self._inverts(op):
            self.ways_back[op.outputs[0]] = self.places[op.inputs[1]]
        elif kind is OpKind.ADD_AT and self._returns(op):
            return
        elif kind not in (OpKind.COUNT, OpKind.LIKE):
            self._keep_order(op, kind)

    def _sorts_groups(self, op: Op) -> bool:
        given = self.graph.tensors[op.inputs[0]]
        return given.is_whole_numbered and len(given.shape) == 1 and bool(self._rows(given.name))

    def _sort(self, op: Op) -> None:
        (given,), places = op.inputs, op.outputs[-1]
        if given in self.places:  # sorting the indices of a sort gives the inverse permutation
            self.ways_back[places] = self.sorts[op.name] = self.places[given]
            return
        self._mix(given)
        self.sorts[op.name] = op.name
        self.order.update(dict.fromkeys(op.outputs, op.name))
        self.places[places] = op.name

    def _inverts(self, op: Op) -> bool:
        """Whether an op writes row numbers to the places that a sort's indices name."""
        if len(op.inputs) != 3 or op.inputs[1] not in self.places:
            return False
        maker = self.graph.index.made_by.get(op.inputs[2])
        return maker is not None and kind_of(maker) is OpKind.RANGE

    def _returns(self, op: Op) -> bool:
        """Whether an op adds rows in the order of a sort back to their original places."""
        target, places, added = op.inputs
        order = self.places.get(places, _NATURAL)
        return order == self.order.get(added) and target not in self.order

    def _take(self, op: Op, source: str, index: str) -> None:
        """Record the result's order: a sort's indices give its order, their inverse undoes it."""
        made, order = op.outputs[0], self.order.get(source, _NATURAL)
        if index in self.places and order == _NATURAL:
            self.order[made] = self.places[index]
        elif index in self.ways_back and order == self.ways_back[index]:
            return
        elif not self._rows(source) and index not in self.ways_back:
            # entries of a table that has no rows of the batch (a bias for each expert): they are
            # in the order of the index
            self.order[made] = self.order.get(index, _NATURAL)
        else:
            self._mix(source, index)

    def _keep_order(self, op: Op, kind: OpKind) -> None:
        rowed = [one for one in op.inputs if self._rows(one)]
        orders = {self.order.get(one, _NATURAL) for one in rowed}
        leads_back = any(one in self.ways_back for one in op.inputs)
        if orders <= {_NATURAL} and not leads_back:
            return
        kept = [out for out in op.outputs if self._rows(out)]
        is_as_long = len({self._rows(one) for one in (*rowed[:1], *kept)}) == 1
        if leads_back or len(orders) > 1 or not is_as_long:
            self._mix(*op.inputs)
            return
        (order,) = orders
        self.order.update(dict.fromkeys(kept, order))
        if (kind.keeps_entries or kind in _KEEPING_INDICES) and op.inputs[0] in self.places:
            self.places.update(dict.fromkeys(kept, order))
        if kind is OpKind.GROUPED:
            self.sorts[op.name] = order

    def _rows(self, name: str) -> Extent | None:
        """Return the number of rows, if the first size of a tensor depends on the batch."""
        shape = self.graph.tensors[name].shape
        return shape[0] if shape and not shape[0].is_constant else None

    def _mix(self, *names: str) -> None:
        sorts = (self.order, self.places, self.ways_back)
        self.mixed.update(own[name] for own in sorts for name in names if own.get(name))


_ALONG = (OpKind.ALONG, OpKind.SOFTMAX, OpKind.SORT, OpKind.ARGSORT)
_TAKING = (OpKind.PART, OpKind.PARTS)


@once_per_graph
def meeting_rows(graph: Graph) -> Op | None:
    """Return the first op that combines rows, for the loss or for a buffer.

    It may compare all pairs of rows (contrastive losses), a row with the next one, or the two
    halves of a batch; use a result of all rows in each row (centering); compute with the number of
    rows, or with their places; take a nonlinear function, such as a root, of a mean or sum over
    rows; write a result of rows to a buffer; or normalise rows by their statistics. torch's own
    batch norms do not count: they share their statistics over all ranks.
    """
    of_parts, grouped, placed = all_of_parts(graph), grouped_rows(graph), row_places(graph)
    for op in graph.ops:
        if op.name in grouped:
            continue
        if op.name in placed.counting | placed.along:
            return op
        if any(by(op, graph) for by in _MEETING):
            return op
        if any(by(op, graph, of_parts) for by in (_shares_result, _uses_row_count, _writes_result)):
            return op
    return loss_of_parts(graph).op if of_parts[graph.loss] is Follows.MEETS else None


def use_of_places(met: Op, graph: Graph) -> str:
    """Return, as the end of a sentence, that an op computes with places of rows; else ""."""
    is_counting = met.name in row_places(graph).counting
    return ", which computes with their places in the batch" if is_counting else ""


def _compares_rows(op: Op, graph: Graph) -> bool:
    """Whether an op computes a number for every pair of rows."""
    return any(_varying(graph, name) > 1 for name in op.outputs)


def _shares_result(op: Op, graph: Graph, of_parts: Mapping[str, Follows]) -> bool:
    """Whether an op uses a result of all rows in each row.

    A gradient (`torch.autograd.grad`) of a sum over rows does not: each row's part of it depends on
    that row alone. A gradient of a mean does, because it contains the number of rows.
    """
    added = (Follows.ALIKE, Follows.ROWS, Follows.SUM)
    if kind_of(op) is OpKind.GRADIENT and all(of_parts[name] in added for name in op.inputs):
        return False
    is_shared = any(of_parts[name] not in (Follows.ALIKE, Follows.ROWS) for name in op.inputs)
    return is_shared and any(_varying(graph, name) for name in (*op.inputs, *op.outputs))


def _uses_row_count(op: Op, graph: Graph, of_parts: Mapping[str, Follows]) -> bool:
    """Whether an op computes with the number of rows, or counts down from it.

    Ops on a mean or sum over rows do not count here: `loss_of_parts` judges them.
    """
    del graph
    start = op.given("start") if kind_of(op) is OpKind.RANGE else None
    if isinstance(start, Extent) and not start.is_constant:
        return True
    known = (Follows.MEAN, Follows.SUM)
    return counts_rows(op) and not any(of_parts[name] in known for name in op.inputs)


def _mixes_rows(op: Op, graph: Graph) -> bool:
    """Whether an op works along the rows, or takes a part of them."""
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


def _writes_result(op: Op, graph: Graph, of_parts: Mapping[str, Follows]) -> bool:
    """Whether an op that is no batch norm writes a result of rows to a buffer.

    Ranks would write different results.
    """
    if kind_of(op) is OpKind.BATCH_NORM:
        return False
    return bool(written_buffers(op, graph)) and any(
        of_parts[name] is not Follows.ALIKE for name in op.inputs
    )


def _divides_by_frequency(op: Op, graph: Graph) -> bool:
    """Whether an embedding divides an entry's gradient by how often it occurs in all rows."""
    del graph
    return bool(op.given("scale_grad_by_freq"))


def _normalises_alone(op: Op, graph: Graph) -> bool:
    """Whether an op takes statistics over rows in a module that is no batch norm of torch."""
    if not takes_statistics(op) or not _varying(graph, op.inputs[0]):
        return False
    return op.call not in graph.calls or not graph.calls[op.call].is_batch_norm


def _varying(graph: Graph, name: str) -> int:
    """Return how many sizes of a tensor depend on the batch."""
    return sum(not size.is_constant for size in graph.tensors[name].shape)


_MEETING = (_compares_rows, _mixes_rows, _divides_by_frequency, _normalises_alone)


def may_be_uneven(graph: Graph) -> bool:
    """Whether a batch may be cut into parts of unequal size.

    Rows must be independent, and the losses of such parts must give the batch's loss.
    """
    if graph.fixed_batch is not None or meeting_rows(graph) is not None:
        return False
    return parts_have_weights(graph)


def parts_have_weights(graph: Graph) -> bool:
    """Whether the loss of a batch is a weighted mean, or a sum, of the losses of unequal parts.

    The weight of a part is its number of rows, or of what the mean counts, such as valid targets.
    `(x * m).mean() / m.mean()` is no such loss: the divisor for the batch is not the sum of the
    parts' divisors.
    """
    follows = all_of_parts(graph)
    if follows[graph.loss] not in (Follows.MEAN, Follows.SUM):
        return False
    divisions = [
        division_of(graph, op) for op in graph.ops if is_weighed_division(op, graph, follows)
    ]
    names = [name for one in divisions if one is not None for name in (one.counted, *one.counts)]
    return all(follows[name] is Follows.SUM for name in names)


def drawn_once(graph: Graph) -> Op | None:
    """Return the first op whose random numbers are shared by all rows of a batch.

    Examples are a dropped layer, noise that is added to a weight, dropout of a weight.
    """
    for op in graph.ops:
        if is_random(op) and not any(_varying(graph, name) for name in op.outputs):
            return op
    return None
