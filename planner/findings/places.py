"""Finds ops that use the places of rows in a batch, or that work along the rows.

A part of a batch counts its rows from 0 again. A number for each row, such as `torch.arange(B)`,
has a stride: by how much it grows from one row to the next. Sums and products with plain numbers
have other strides. An index that has the stride of the indexed rows (`x[torch.arange(B), last]`)
finds every row itself, also in a part of the batch. Any other use of a stride depends on a row's
place.

A mixture of experts sorts rows by expert, multiplies each group by its expert's matrix, and puts
every row back in its place. Rows do not affect each other if no op combines a tensor in the order
of a sort with a tensor in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from autopar.planner.axes.infer import Conflict, GraphAxes, infer_axes
from autopar.planner.graph.graph import Graph, once_per_graph
from autopar.planner.graph.ops import Extent, Op, Ref, refs
from autopar.planner.rules.rule import OpKind, is_random
from autopar.planner.rules.signature import Concat, Dim, FlattenedDims, leaves, size_of, substituted
from autopar.planner.rules.table import kind_of, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlaces:
    """The ops that use places of rows, and those that work along the rows of a batch; by name."""

    counting: frozenset[str]
    along: frozenset[str]


@once_per_graph
def row_places(graph: Graph) -> RowPlaces:
    """Find the ops of a graph whose results for a row depend on its place, or on other rows."""
    strides, rows = _StrideReader(graph), _AlongRows(graph, infer_axes(graph))
    for op in graph.ops:
        strides.read(op)
    along = frozenset(op.name for op in graph.ops if rows.has(op))
    return RowPlaces(counting=frozenset(strides.used), along=along)


_KEEPING = (OpKind.EXPAND, OpKind.REPEAT, OpKind.PART, OpKind.PARTS)
_ALIKE = (OpKind.NEW, OpKind.FILL, OpKind.LIKE, OpKind.EXPAND, OpKind.REPEAT)
_FINDING = (OpKind.SORT, OpKind.ARGSORT, OpKind.ALONG, OpKind.VALUES, OpKind.PLACES)
_EQUAL_NUMBERS = ("zeros", "ones", "empty", "full", "scalar_tensor")


class _StrideReader:
    """Determines the stride of every tensor, op after op; `used` names ops that use one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.strides: dict[str, int] = {}  # those that are not 0
        self.found: set[str] = set()  # places found by values (argsort): right as indices only
        self.used: set[str] = set()

    def read(self, op: Op) -> None:
        """Record the strides of an op's results."""
        indices = tuple(_indices(op))
        finds = is_random(op) or kind_of(op) in _FINDING
        if indices:
            self._index(op, indices)
        elif finds or any(one in self.found for one in op.inputs):
            whole = (one for one in op.outputs if self.graph.tensors[one].is_whole_numbered)
            self.found.update(whole)
        elif any(self.strides.get(one) for one in op.inputs):
            self._record(op, self._stride(op))
        elif not any(_is_of_rows(self.graph, one) for one in op.inputs):
            self._record(op, self._first_stride(op))

    def _record(self, op: Op, stride: int | None) -> None:
        learns = any(self.graph.tensors[one].requires_grad for one in op.outputs)
        if stride is None or (stride and learns):
            self.used.add(op.name)
        elif stride:
            self.strides.update(dict.fromkeys(op.outputs, stride))

    def _first_stride(self, op: Op) -> int | None:
        """Return the stride of a tensor not computed from rows; None if its numbers have none."""
        made = self.graph.tensors[op.outputs[0]].shape if op.outputs else ()
        if all(size.is_constant for size in made):
            return 0
        if kind_of(op) is OpKind.RANGE:
            start, step = (dict(op.arguments).get(key, n) for key, n in (("start", 0), ("step", 1)))
            count, is_plain = _per_row(made[0]), isinstance(start, int | float)
            return count * step if count and is_plain and isinstance(step, int) else None
        is_alike = kind_of(op) in _ALIKE or _name(op).startswith(_EQUAL_NUMBERS)
        return 0 if is_alike else None

    def _stride(self, op: Op) -> int | None:
        """Return the results' stride if an input has one; None if the op uses the input's."""
        kind, arguments = kind_of(op), dict(op.arguments)
        given = [self.strides.get(one, 0) for one in op.inputs]
        other = arguments.get("other")
        number = other if isinstance(other, int) else None
        if kind.keeps_entries or kind in _KEEPING:
            return given[0]
        if kind in (OpKind.LIKE, OpKind.NEW):
            return 0
        if kind in (OpKind.ADDITION, OpKind.SUBTRACTION) and arguments.get("alpha", 1) == 1:
            sign = 1 if kind is OpKind.ADDITION else -1
            return given[0] + sign * given[1] if len(given) == 2 else given[0]
        if kind is OpKind.MULTIPLICATION and number is not None:
            return given[0] * number
        if kind is OpKind.QUOTIENT and number and given[0] % number == 0:
            return 0 if "remainder" in op.target else given[0] // number
        if len(set(given)) == 1 and len(given) > 1:
            return 0 if kind is OpKind.COMPARISON else given[0] if kind is OpKind.JOIN else None
        return None

    def _index(self, op: Op, indices: tuple[tuple[int, str], ...]) -> None:
        """Read an op that reads or writes at indices."""
        source, *given = op.inputs
        if kind_of(op) is OpKind.BAG:  # offsets of bags index the indices of entries
            source = next(refs(op.argument("indices")))
        shape = self.graph.tensors[source].shape
        for dim, name in indices:
            rows, stride = _per_row(shape[dim]), self.strides.get(name, 0)
            is_mask = self.graph.tensors[name].dtype == "bool"
            if not is_mask and name not in self.found and stride != rows:
                self.used.add(op.name)
        written = set(given) - {name for _, name in indices}
        if any(self.strides.get(one) or one in self.found for one in (source, *written)):
            self.found.update(op.outputs)


def _name(op: Op) -> str:
    return op.target.partition(".")[2]


def _indices(op: Op) -> Iterator[tuple[int, str]]:
    """Yield the index tensors of an op that reads or writes at indices, with their dims."""
    arguments = dict(op.arguments)
    given, dim = arguments.get("indices", arguments.get("index")), arguments.get("dim")
    if kind_of(op) is OpKind.BAG:
        yield from ((0, name) for name in refs(arguments.get("offsets")))
    elif "self" not in arguments:
        return
    elif isinstance(given, tuple):
        yield from ((place, one.tensor) for place, one in enumerate(given) if isinstance(one, Ref))
    elif isinstance(given, Ref) and isinstance(dim, int):
        yield dim, given.tensor


def _per_row(size: Extent) -> int | None:
    """Return k for a size of k·B, 0 for a constant, None for others, such as B + 1."""
    if size.is_constant:
        return 0
    constant, count, *powers = size.coefficients
    return None if constant or powers else count


def _is_of_rows(graph: Graph, name: str) -> bool:
    return any(not size.is_constant for size in graph.tensors[name].shape)


# arguments of which all numbers together decide each result
_SETS = ("boundaries", "sorted_sequence", "test_elements")
_SELECTING = (OpKind.INDEX, OpKind.BAG, OpKind.GROUPED, OpKind.VALUES, OpKind.SLICES)


@dataclass(frozen=True, slots=True)
class _AlongRows:
    """Tells which ops work along the rows of a batch."""

    graph: Graph
    axes: GraphAxes

    def has(self, op: Op) -> bool:
        """Whether a result of an op for one row depends on other rows, or on the rows' order."""
        kind = kind_of(op)
        if not op.inputs or not any(_is_of_rows(self.graph, name) for name in op.outputs):
            return False
        if self._is_in_other_order(op):
            return True
        if kind in _SELECTING or any(_indices(op)):
            return False
        if self.axes.ops[op.name].signature.is_opaque or kind is OpKind.DIAGONAL:
            return self._is_along_arguments(op)
        if kind is OpKind.PART:
            return self._cuts_rows(op)
        return self._has_whole_letter(op) or self._adds_up(op)

    def _has_whole_letter(self, op: Op) -> bool:
        own = self.axes.ops[op.name]
        letters = (own.letters[name] for name in own.signature.whole if name in own.letters)
        return any(not size_of(dim).is_constant for dim in letters)

    def _adds_up(self, op: Op) -> bool:
        """Whether a product adds up over rows, and its result has rows, too."""
        if not rule_of(op.target).contracts:
            return False
        signature = self.axes.ops[op.name].signature
        left, kept = (
            {leaf.name for _, dims in own for dim in dims for leaf in leaves(dim)
             if not leaf.size.is_constant}
            for own in (signature.operands, signature.results)
        )  # fmt: skip
        return not left <= kept

    def _is_in_other_order(self, op: Op) -> bool:
        """Whether an op combines tensors that have rows in unlike orders, such as 2·B and B·2."""
        own = self.axes.ops[op.name]
        for name, dims in own.signature.operands:
            for place, dim in enumerate(dims):
                conflict = Conflict(op=op.name, tensor=name, dim=place)
                if conflict not in self.axes.conflicts:
                    continue
                seen = substituted(dim, lambda leaf: own.letters[leaf.name])
                if _order(seen) != _order(self.axes.dims[name][place]):
                    return True
        return False

    def _cuts_rows(self, op: Op) -> bool:
        """Whether a slice takes some of the rows, and not one of several whole sets of rows."""
        (name,), arguments = op.inputs, dict(op.arguments)
        shape, dim = self.graph.tensors[name].shape, arguments.get("dim", 0)
        if not isinstance(dim, int) or not shape or shape[dim].is_constant:
            return False
        size = shape[dim]
        if self.graph.tensors[op.outputs[0]].shape == shape:
            return False
        if arguments.get("step", 1) != 1:
            return _order(self.axes.dims[name][dim]) != (1,)
        ends = (arguments.get("start") or 0, arguments.get("end"))
        borders = {*_borders(self.axes.dims[name][dim]), size}
        return any(_position(end, size) not in borders for end in ends)

    def _is_along_arguments(self, op: Op) -> bool:
        """Whether the arguments of an op, whose letters are not known, name the dim of rows."""
        arguments, shape = dict(op.arguments), self.graph.tensors[op.inputs[0]].shape
        if any(_is_of_rows(self.graph, one) for key in _SETS for one in refs(arguments.get(key))):
            return True
        rows = [place for place, size in enumerate(shape) if not size.is_constant]
        kind, given = kind_of(op), arguments.get("dim", arguments.get("dimension", ()))
        if kind is OpKind.NORM:
            return any(place > 0 for place in rows)
        if kind is OpKind.DIAGONAL:
            given = (arguments.get("dim1", -2), arguments.get("dim2", -1))
        if "fft" in op.target and given is None:
            return bool(rows)
        dims = given if isinstance(given, tuple) else (given,)
        places = {dim % len(shape) for dim in dims if isinstance(dim, int) and shape}
        return not places.isdisjoint(rows) or self._changes_later_rows(op)

    def _changes_later_rows(self, op: Op) -> bool:
        """Whether a result has another number of rows in a dim that is not the first (pooling)."""
        given = {size for name in op.inputs for size in self.graph.tensors[name].shape}
        made = (size for name in op.outputs for size in self.graph.tensors[name].shape[1:])
        return any(not size.is_constant and size not in given for size in made)


def _position(end: object, size: Extent) -> Extent:
    """Return where a slice begins or ends; numbers beyond every batch are the end."""
    if isinstance(end, Extent):
        return end
    if not isinstance(end, int) or end >= 2**31:
        return size
    return Extent.of(end) if end >= 0 else size + Extent.of(end)


def _borders(dim: Dim) -> Iterator[Extent]:
    """Yield where sets of rows begin in a dim: where parts do, or repetitions of all rows."""
    yield Extent(())
    if isinstance(dim, Concat):
        yield from accumulate(map(size_of, dim.parts))
    elif isinstance(dim, FlattenedDims) and size_of(dim.factors[0]).is_constant:
        times, size = size_of(dim.factors[0]).at(0), size_of(dim)
        part = size.divided_by(Extent.of(times)) or size
        yield from (Extent.of(place) * part for place in range(times))


def _order(dim: Dim) -> tuple[int, ...]:
    """Return how often a dim repeats the sequence of rows, for each part of a concatenated dim."""
    if isinstance(dim, Concat):
        return tuple(times for part in dim.parts for times in _order(part))
    times = 1
    for factor in dim.factors if isinstance(dim, FlattenedDims) else ():
        if not size_of(factor).is_constant:
            inner = _order(factor) if isinstance(factor, Concat) else (1,)
            return tuple(times * one for one in inner)
        times *= size_of(factor).at(0)
    return (times,)


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
