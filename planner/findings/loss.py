"""Determines how the loss of a batch follows from the losses of its parts.

The loss of a batch is the mean or the sum of its parts' losses, or neither. A reduction makes a
mean or a sum over rows, and linear ops preserve that. A nonlinear function of such a number (a
root, a product, a maximum) cannot be computed from the parts' values.

A mean may be over some elements of a batch only: valid targets, or elements that a mask selects. A
part is then weighted by its own number of elements, which must depend on the batch alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from autopar.planner.graph.graph import Graph, once_per_graph
from autopar.planner.graph.ops import BATCH, Extent, Op, Ref, TensorOrigin, Value, refs
from autopar.planner.rules.rule import Linear, OpKind, Rule, is_random
from autopar.planner.rules.shapes import elementwise
from autopar.planner.rules.table import kind_of, rule_of, rule_out_of_place

_NUMBERS = frozenset(  # arguments that hold a plain number to compute with
    {
        "other",
        "self",
        "alpha",
        "beta",
        "scale",
        "value",
        "min",
        "max",
        "exponent",
        "fill_value",
        "s",
    }
)


def numbers(op: Op) -> Iterator[int | float | Extent]:
    """Yield the plain numbers that an op computes with."""
    for name, value in op.arguments:
        if name in _NUMBERS and isinstance(value, (int, float, Extent)):
            yield value


def counts_rows(op: Op) -> bool:
    """Whether an op computes with a number that depends on the number of rows."""
    return any(isinstance(one, Extent) and not one.is_constant for one in numbers(op))


_MEAN = 1  # ATen's code for reduction="mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A division by a number that the batch alone determines.

    `counted` is divided by `divisor`. `counts` are numbers computed from rows. `steps` are the ops
    that turn these numbers into the divisor, such as `clamp(min=1)`.
    """

    counted: str
    divisor: str
    counts: tuple[str, ...]
    steps: tuple[Op, ...]


def is_class(graph: Graph, target: Ref) -> bool:
    """Whether a loss over classes gets a class index per row, not probabilities."""
    return graph.tensors[target.tensor].is_whole_numbered


def counted_by(op: Op, graph: Graph) -> tuple[str, ...]:
    """Return the tensors that decide which elements a mean counts; () if it counts all of them.

    For a loss over classes, these are the targets and class weights. Otherwise it is the mask that
    selected the mean's elements. For an op that is no mean, the result is (), too.
    """
    arguments = dict(op.arguments)
    is_mean = arguments.get("reduction") == _MEAN or kind_of(op) is OpKind.MEAN
    if not is_mean:
        return ()
    if kind_of(op).is_class_loss:
        target, weight = op.argument("target"), op.argument("weight")
        assert isinstance(target, Ref)
        has_classes = is_class(graph, target)
        given = (target, weight) if has_classes else ()
        return tuple(one.tensor for one in given if isinstance(one, Ref))
    made = (graph.tensors[name] for name in op.outputs)
    if any(one.counted_by for one in made):
        return ()
    return tuple(sorted({graph.tensors[name].counted_by for name in op.inputs} - {""}))


def counts_selected(op: Op, graph: Graph) -> bool:
    """Whether a mean counts elements that the model selects: the batch does not tell how many.

    If a loss has targets and no class weights, the answer is yes only if an op that computes the
    targets has the loss's ignore_index as an argument.
    """
    names = counted_by(op, graph)
    if not names or is_known_from_batch(graph, names):
        return False
    if kind_of(op).is_class_loss and len(names) == 1:
        return _ignores(op, graph, names[0])
    return True


def is_known_from_batch(graph: Graph, names: Iterable[str]) -> bool:
    """Whether the batch alone determines these tensors, which decide what a mean counts."""
    tensors = [graph.tensors.get(name) for name in names]
    is_known = all(one is not None and one.counted_by != one.name for one in tensors)
    return is_known and steps_from_batch(graph, names) is not None


def _ignores(op: Op, graph: Graph, target: str) -> bool:
    """Whether an op that computes the targets has the loss's ignore_index as an argument."""
    ignored = op.argument("ignore_index")
    return any(
        not isinstance(value, bool) and value == ignored
        for step in graph.index.needed_for([target])
        for _, value in step.arguments
    )


def division_of(graph: Graph, op: Op) -> Division | None:
    """Return an op's division by a number that the batch alone determines, or None.

    Such a division turns a sum over rows into a mean: `(x * mask).sum() / mask.sum()`.
    """
    if kind_of(op) is not OpKind.DIVISION:
        return None
    above, below = op.argument("self"), op.argument("other")
    is_number = not graph.tensors[op.outputs[0]].shape
    if not (is_number and isinstance(above, Ref) and isinstance(below, Ref)):
        return None
    if graph.tensors[below.tensor].requires_grad or steps_from_batch(graph, [below.tensor]) is None:
        return None
    steps, counts = _made_of_numbers(graph, below.tensor)
    return Division(counted=above.tensor, divisor=below.tensor, counts=counts, steps=steps)


def _made_of_numbers(graph: Graph, name: str) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """Return the ops, in order, that compute a scalar from other scalars, and the first scalars.

    The first scalars are computed from rows. Ops whose result is the same for every batch are
    included.
    """
    of_batch = {out for op in graph.index.reached_from(graph.inputs) for out in op.outputs}
    waiting, steps, counts = [name], dict[str, Op](), dict[str, None]()
    while waiting:
        one = waiting.pop()
        maker = graph.index.made_by.get(one)
        if maker is None:
            continue
        if one not in of_batch or _is_of_numbers(maker, graph):
            steps[maker.name] = maker
            waiting += maker.inputs
        else:
            counts[one] = None
    places = graph.index.places
    return tuple(sorted(steps.values(), key=lambda op: places[op.name])), tuple(counts)


def _is_of_numbers(op: Op, graph: Graph) -> bool:
    """Whether an op computes a scalar from scalars, and not from the number of rows."""
    is_for_each = rule_of(op.target).shape is elementwise and not counts_rows(op)
    return is_for_each and not op.writes and not any(graph.tensors[i].shape for i in op.inputs)


def steps_from_batch(graph: Graph, targets: Iterable[str]) -> tuple[Op, ...] | None:
    """Return the ops that compute tensors from the batch alone.

    None if a parameter, a buffer or a random number is used.
    """
    needed = set(targets)
    steps = graph.index.needed_for(needed)
    needed |= {name for op in steps for name in op.inputs}
    origins = {graph.tensors[name].origin for name in needed}
    is_own = origins & {TensorOrigin.PARAMETER, TensorOrigin.BUFFER} or any(map(is_random, steps))
    return None if is_own else steps


class Follows(StrEnum):
    """How a tensor of a whole batch follows from the same tensor of equal parts of the batch."""

    ALIKE = "alike"  # it does not depend on rows
    ROWS = "rows"  # it has a value for each row
    MEAN = "mean"  # of the parts' tensors
    SUM = "sum"  # of the parts' tensors
    NEARLY = "nearly"  # the mean, except for weights or a term that depend on the whole batch
    MEETS = "meets"  # it cannot be computed from parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOfParts:
    """How the loss of a batch follows from the parts' losses, and the op that decides this."""

    follows: Follows
    op: Op | None = None


_SCALING = (OpKind.MULTIPLICATION, OpKind.DIVISION)
_KEEPING = (OpKind.ADDITION, OpKind.SUBTRACTION, OpKind.WRITE, OpKind.DIAGONAL)
# their result belongs to all rows together, even if its size depends on the batch
_COLLECTED = (OpKind.COUNT, OpKind.VALUES)
_OF_ROWS = (Follows.MEAN, Follows.SUM)
_REDUCTIONS = (Follows.MEETS, Follows.MEAN, Follows.SUM)  # for ATen's codes 0, 1 and 2


def loss_of_parts(graph: Graph) -> LossOfParts:
    """Return how the loss of a graph follows from the losses of equal parts of the batch."""
    found = all_of_parts(graph)
    follows = found[graph.loss]
    return LossOfParts(follows=follows, op=_origin(graph, found, follows))


@once_per_graph
def all_of_parts(graph: Graph) -> Mapping[str, Follows]:
    """Return how every tensor of a graph follows from those of equal parts."""
    reader = _LossReader(graph)
    reader.read()
    return MappingProxyType(reader.follows)


def is_weighed_division(op: Op, graph: Graph, follows: Mapping[str, Follows]) -> bool:
    """Whether an op divides a mean or sum over rows by a number that the batch alone determines.

    The result is a mean in which the weight of each part is the part's own divisor.
    """
    division = division_of(graph, op)
    if division is None or not division.counts or _is_weighed(division.counted, graph):
        return False
    return all(follows[name] in _OF_ROWS for name in (division.counted, *division.counts))


def _is_weighed(number: str, graph: Graph) -> bool:
    """Whether a number is computed from a mean whose weights are not the parts' numbers of rows."""
    maker = graph.index.made_by.get(number)
    if maker is None or graph.tensors[number].shape:
        return False
    if counted_by(maker, graph) or division_of(graph, maker) is not None:
        return True
    return any(_is_weighed(one, graph) for one in maker.inputs)


def _origin(graph: Graph, found: Mapping[str, Follows], kind: Follows) -> Op | None:
    """Return the op at which this kind of result begins, on a path back from the loss."""
    makers = graph.index.made_by
    op = makers.get(graph.loss)
    while op is not None:
        before = next((one for one in op.inputs if found[one] is kind and one in makers), None)
        if before is None:
            return op
        op = makers[before]
    return None


class _LossReader:
    """Determines for each op of a graph, in order, how its results follow from parts."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.follows: dict[str, Follows] = {}
        zeros = (op for op in graph.ops if "zeros" in op.target)
        self.zeros = {out for op in zeros for out in op.outputs}  # a sum may start with them
        for tensor in graph.tensors.values():
            if tensor.origin is not TensorOrigin.OP:
                is_sum = tensor.origin is TensorOrigin.GRADIENT  # of a weight
                other = Follows.SUM if is_sum else Follows.ALIKE
                self.follows[tensor.name] = self._of_shape(tensor.name) or other

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
        rule = rule_out_of_place(op.target)  # in-place ops behave like their out-of-place forms
        if rule.kind in (OpKind.NEW, OpKind.LIKE):
            return Follows.ALIKE
        if self._has_own_gradients(op):
            return Follows.MEETS
        if rule.kind is OpKind.GRADIENT:  # contributions of rows are summed
            of = {self.follows[name] for name in refs(op.argument("outputs"))}
            return Follows.SUM if of <= {Follows.ROWS, Follows.SUM} else Follows.MEETS
        return self._of_rows(op, rule) if Follows.ROWS in kinds else self._of_numbers(op, rule)

    def _has_own_gradients(self, op: Op) -> bool:
        """Whether an op is in an autograd Function whose backward alone reads rows.

        Its gradient for these rows may depend on their number, whatever weighs the loss.
        """
        index = self.graph.index
        for key in index.around(op.call):
            call = self.graph.calls[key]
            for name in refs(call.arguments) if call.is_function else ():
                is_read = any(key in index.around(one.call) for one in index.readers[name])
                learns = name in self.follows and self.graph.tensors[name].requires_grad
                if learns and not is_read and self.follows[name] is Follows.ROWS:
                    return True
        return False

    def _of_rows(self, op: Op, rule: Rule) -> Follows:
        arguments = dict(op.arguments)
        reduction = arguments.get("reduction")
        if counts_selected(op, self.graph):
            return Follows.NEARLY
        if isinstance(reduction, int):
            return _REDUCTIONS[reduction]
        if rule.kind is OpKind.MEAN:
            return Follows.MEAN
        if rule.kind is OpKind.COUNT and arguments.get("min") != arguments.get("max"):
            return Follows.SUM  # the bins do not depend on rows
        adds = isinstance(arguments.get(rule.added), Ref)  # each part would add this term
        if rule.kind is OpKind.SUM or (rule.linear is Linear.EACH and not adds):
            return Follows.SUM
        return self._unknown(op, rule)

    def _of_numbers(self, op: Op, rule: Rule) -> Follows:
        if rule.kind in _SCALING:
            return self._scaled(op, rule.kind)
        varying = list(dict.fromkeys(self._varying(op)))
        adds = isinstance(op.given(rule.added), Ref)
        if rule.linear is Linear.EACH and len(varying) == 1 and not adds:
            return self.follows[varying[0]]
        is_linear = rule.linear not in (Linear.UNKNOWN, Linear.NO)
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
    """Return how a mean or sum follows from parts once it is multiplied or divided by a number."""
    if not isinstance(number, Extent) or number.is_constant:
        return kind
    pairs = {(Follows.SUM, True): Follows.MEAN, (Follows.MEAN, False): Follows.SUM}
    quotient = number.divided_by(BATCH)
    is_multiple = quotient is not None and quotient.is_constant
    return pairs.get((kind, is_division), Follows.NEARLY) if is_multiple else Follows.NEARLY
