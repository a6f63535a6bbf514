"""Says how the loss of a batch follows from those of its parts: as their mean, or as their sum.

A reduction makes a mean or a sum over rows, and linear ops keep that. What else is made of such
numbers (a root, a product, the greatest) no part of the batch knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from autopar.planner.extent import BATCH, Extent
from autopar.planner.findings.counting import counted_by, counts_untold, division_of
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Origin, Ref, Value, refs
from autopar.planner.rules.rule import Linear, OpKind, Rule
from autopar.planner.rules.table import kind_of, rule_out_of_place


class Follows(StrEnum):
    """What a tensor of a whole batch is to those of its equal parts."""

    ALIKE = "alike"  # rows have no part in it
    ROWS = "rows"  # it has a value for each row
    MEAN = "mean"
    SUM = "sum"
    NEARLY = "nearly"  # their mean, but for weights or for a term that no part knows
    MEETS = "meets"  # nothing that the parts would tell


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOfParts:
    """How the loss follows, and at which op it became that."""

    follows: Follows
    op: Op | None = None


_SCALING = (OpKind.MULTIPLICATION, OpKind.DIVISION)
_KEEPING = (OpKind.ADDITION, OpKind.SUBTRACTION, OpKind.WRITE, OpKind.DIAGONAL)
_COLLECTED = (OpKind.COUNT, OpKind.VALUES)  # of all rows, however many those are
_OF_ROWS = (Follows.MEAN, Follows.SUM)
_REDUCTIONS = (Follows.MEETS, Follows.MEAN, Follows.SUM)  # as ATen counts them


def loss_of_parts(graph: Graph) -> LossOfParts:
    """Return how the loss of a graph follows from the losses of equal parts of the batch."""
    found = all_of_parts(graph)
    follows = found[graph.loss]
    return LossOfParts(follows=follows, op=_origin(graph, found, follows))


def all_of_parts(graph: Graph) -> Mapping[str, Follows]:
    """Return for every tensor of a graph how it follows from those of equal parts."""
    reader = _Reader(graph)
    reader.read()
    return MappingProxyType(reader.follows)


def is_weighed_division(op: Op, graph: Graph, follows: Mapping[str, Follows]) -> bool:
    """Whether an op divides a mean or sum over rows by a number that the batch alone tells.

    It is a mean then, in which each part has the weight of its own such number.
    """
    division = division_of(graph, op)
    if division is None or not division.counts or _is_weighed(division.counted, graph):
        return False
    return all(follows[name] in _OF_ROWS for name in (division.counted, *division.counts))


def _is_weighed(number: str, graph: Graph) -> bool:
    """Whether a number is made of means in which parts have other weights than their rows."""
    maker = graph.index.made_by.get(number)
    if maker is None or graph.tensors[number].shape:
        return False
    if counted_by(maker, graph) or division_of(graph, maker) is not None:
        return True
    return any(_is_weighed(one, graph) for one in maker.inputs)


def _origin(graph: Graph, found: Mapping[str, Follows], kind: Follows) -> Op | None:
    """Return the first op on the way to the loss that made it what it is."""
    makers = graph.index.made_by
    op = makers.get(graph.loss)
    while op is not None:
        before = next((one for one in op.inputs if found[one] is kind and one in makers), None)
        if before is None:
            return op
        op = makers[before]
    return None


class _Reader:
    """Reads the ops of a graph in their order, and what each makes of the rows."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.follows: dict[str, Follows] = {}
        zeros = (op for op in graph.ops if "zeros" in op.target)
        self.zeros = {out for op in zeros for out in op.outputs}  # where a sum begins
        for tensor in graph.tensors.values():
            if tensor.origin is not Origin.OP:
                self.follows[tensor.name] = self._of_shape(tensor.name) or Follows.ALIKE

    def read(self) -> None:
        """Read all ops."""
        for op in self.graph.ops:
            found = None
            is_collected = kind_of(op) in _COLLECTED
            for name in op.outputs:
                kind = None if is_collected else self._of_shape(name)
                if kind is None:
                    found = kind = found or self._reduced(op)
                self.follows[name] = kind

    def _of_shape(self, name: str) -> Follows | None:
        shape = self.graph.tensors[name].shape
        return None if all(size.is_constant for size in shape) else Follows.ROWS

    def _reduced(self, op: Op) -> Follows:
        kinds = [self.follows[name] for name in op.inputs]
        if all(kind is Follows.ALIKE for kind in kinds):
            return Follows.ALIKE
        rule = rule_out_of_place(op.target)  # what is written in place is made alike
        if rule.kind is OpKind.NEW:
            return Follows.ALIKE
        if rule.kind is OpKind.GRADIENT:  # what each row has a part in is added up
            of = {self.follows[name] for name in refs(op.argument("outputs"))}
            return Follows.SUM if of <= {Follows.ROWS, Follows.SUM} else Follows.MEETS
        return self._of_rows(op, rule) if Follows.ROWS in kinds else self._of_numbers(op, rule)

    def _of_rows(self, op: Op, rule: Rule) -> Follows:
        arguments = dict(op.arguments)
        reduction = arguments.get("reduction")
        if counts_untold(op, self.graph):
            return Follows.NEARLY
        if isinstance(reduction, int):
            return _REDUCTIONS[reduction]
        if rule.kind is OpKind.MEAN:
            return Follows.MEAN
        if rule.kind is OpKind.COUNT and arguments.get("min") != arguments.get("max"):
            return Follows.SUM  # within bounds that no row moves
        adds = isinstance(arguments.get(rule.added), Ref)  # once for each part
        if rule.kind is OpKind.SUM or (rule.linear is Linear.EACH and not adds):
            return Follows.SUM
        return self._unknown(op, rule)

    def _of_numbers(self, op: Op, rule: Rule) -> Follows:
        if rule.kind in _SCALING:
            return self._scaled(op, rule.kind)
        is_linear = rule.linear not in (Linear.UNTOLD, Linear.NO)
        if is_linear or rule.kind.keeps_entries or rule.kind in _KEEPING:
            return self._added(op)
        return self._unknown(op, rule)

    def _unknown(self, op: Op, rule: Rule) -> Follows:
        learns = self.graph.learns(op)
        return Follows.MEETS if rule.linear is Linear.NO and learns else Follows.NEARLY

    def _added(self, op: Op) -> Follows:
        kinds = {self.follows[name] for name in op.inputs if name not in self.zeros}
        if kinds <= {Follows.ALIKE, Follows.MEAN}:
            return Follows.MEAN
        if len(kinds) == 1:
            return kinds.pop()
        return Follows.MEETS if Follows.SUM in kinds else Follows.NEARLY

    def _scaled(self, op: Op, kind: OpKind) -> Follows:
        varying = list(dict.fromkeys(self._varying(op)))
        above, other = op.argument("self"), op.argument("other")
        is_division = kind is OpKind.DIVISION
        if len(varying) == 1 and not (is_division and above != Ref(varying[0])):
            return _by_number(self.follows[varying[0]], other, is_division=is_division)
        if is_division and is_weighed_division(op, self.graph, self.follows):
            return Follows.MEAN
        learning = [name for name in varying if self.graph.tensors[name].requires_grad]
        if is_division and isinstance(other, Ref):
            return Follows.MEETS if other.tensor in learning else Follows.NEARLY
        return Follows.MEETS if len(learning) > 1 or len(varying) == 1 else Follows.NEARLY

    def _varying(self, op: Op) -> Iterator[str]:
        return (name for name in op.inputs if self.follows[name] is not Follows.ALIKE)


def _by_number(kind: Follows, number: Value, *, is_division: bool) -> Follows:
    """Return what a number of rows makes of a mean or a sum; other numbers leave it."""
    if not isinstance(number, Extent) or number.is_constant:
        return kind
    pairs = {(Follows.SUM, True): Follows.MEAN, (Follows.MEAN, False): Follows.SUM}
    quotient = number.divided_by(BATCH)
    is_multiple = quotient is not None and quotient.is_constant
    return pairs.get((kind, is_division), Follows.NEARLY) if is_multiple else Follows.NEARLY
