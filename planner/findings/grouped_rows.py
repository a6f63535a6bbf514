"""Finds rows that are put in the order of their groups, computed there, and brought back.

Experts do that: the rows are sorted by their expert, each group is multiplied by the matrix of its
expert, and every row goes back to its place. No row has a part in another one's result, as long as
what lies in the order of a sort meets nothing that lies in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.planner.extent import Extent
from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of

_NATURAL = ""
# From the places of a sort to the rows that lie there.
_STEPS = (OpKind.DIVISION, OpKind.QUOTIENT, OpKind.EXPAND)


def grouped_rows(graph: Graph) -> frozenset[str]:
    """Return the sorts of whole numbers, and the products by groups, that mix no rows."""
    reader = _Reader(graph)
    for op in graph.ops:
        reader.read(op)
    return frozenset(op for op, sort in reader.sorts.items() if sort not in reader.mixed)


class _Reader:
    """Reads in which order the rows of each tensor lie: as they came, or as a sort has them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order: dict[str, str] = {}  # tensor → the sort in whose order its rows lie
        self.places: dict[str, str] = {}  # tensor → the sort whose rows it names, in their order
        self.ways_back: dict[str, str] = {}  # tensor → the sort from whose order it leads back
        self.sorts: dict[str, str] = {}  # a sort, or an op in its order → the sort
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
            self._keep(op, kind)

    def _sorts_groups(self, op: Op) -> bool:
        given = self.graph.tensors[op.inputs[0]]
        return given.is_whole_numbered and len(given.shape) == 1 and bool(self._rows(given.name))

    def _sort(self, op: Op) -> None:
        (given,), places = op.inputs, op.outputs[-1]
        if given in self.places:  # the sort of a sort's places leads back
            self.ways_back[places] = self.sorts[op.name] = self.places[given]
            return
        self._mix(given)
        self.sorts[op.name] = op.name
        self.order.update(dict.fromkeys(op.outputs, op.name))
        self.places[places] = op.name

    def _inverts(self, op: Op) -> bool:
        """Whether an op writes at the places of a sort the numbers of its rows."""
        if len(op.inputs) != 3 or op.inputs[1] not in self.places:
            return False
        maker = self.graph.index.made_by.get(op.inputs[2])
        return maker is not None and kind_of(maker) is OpKind.RANGE

    def _returns(self, op: Op) -> bool:
        """Whether an op adds what lies in the order of a sort to the rows that its places name."""
        target, places, added = op.inputs
        order = self.places.get(places, _NATURAL)
        return order == self.order.get(added) and target not in self.order

    def _take(self, op: Op, source: str, index: str) -> None:
        """Rows by the places of a sort lie in its order; by the way back, as they came."""
        made, order = op.outputs[0], self.order.get(source, _NATURAL)
        if index in self.places and order == _NATURAL:
            self.order[made] = self.places[index]
        elif index in self.ways_back and order == self.ways_back[index]:
            return
        elif not self._rows(source) and index not in self.ways_back:
            self.order[made] = self.order.get(index, _NATURAL)  # what belongs to each row's group
        else:
            self._mix(source, index)

    def _keep(self, op: Op, kind: OpKind) -> None:
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
        if (kind.keeps_entries or kind in _STEPS) and op.inputs[0] in self.places:
            self.places.update(dict.fromkeys(kept, order))
        if kind is OpKind.GROUPED:
            self.sorts[op.name] = order

    def _rows(self, name: str) -> Extent | None:
        """Return the number of rows, where the first size of a tensor depends on the batch."""
        shape = self.graph.tensors[name].shape
        return shape[0] if shape and not shape[0].is_constant else None

    def _mix(self, *names: str) -> None:
        self.mixed.update(filter(None, self._sorts_of(names)))

    def _sorts_of(self, names: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            yield self.order.get(name, _NATURAL)
            yield self.places.get(name, _NATURAL)
            yield self.ways_back.get(name, _NATURAL)
