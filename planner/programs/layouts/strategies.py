"""Lists the strategies of an op: each gives layouts to its inputs and results.

Why each is correct, with x the inputs, y the results, gx and gy their gradients, x_r on rank r:

    whole        x I, y I: every rank does the same; gy is whole, so gx is whole.
    replicated   x R, y R: the backward is linear in gy, so the partial sums gy_r make partial sums
                 gx_r. All inputs with gradient are R: one in I would get a partial gradient.
    partial      f linear in x jointly: Σ f(x_r) = f(Σ x_r), and gx = fᵀ(gy) is whole on every rank.
                 f(a, b) bilinear, a partial: Σ f(a_r, b) = f(Σ a_r, b); ga is whole, but gb is made
                 from a_r, so it is a partial sum: b is R. An added term (a bias) is P too: in any
                 other layout every rank would add it.
    split        a letter of the op's rule, along an axis that the letter stands for. Tensors with
                 the letter are S. A result without the letter is a sum over it, so P. An input
                 without the letter meets only the rank's part of the positions, so its gradient
                 is a partial sum: R; but a term added to a partial result is P. A mean divides by
                 the whole size, not by the rank's part, so its parts add up, too. A `split_form`
                 that adds up the ranks' parts itself gives I; its gradient gy is whole, and so is
                 that of each input without the letter.

A tensor without gradient is never R, because I is the same for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import PARTIAL, REPLICATED, WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import Extent, Op, Ref, TensorOrigin, refs
from autopar.planner.rules import shapes
from autopar.planner.rules.rule import Linear, OpKind, SplitForm
from autopar.planner.rules.signature import (
    Concat,
    Dim,
    Dims,
    FlattenedDims,
    Leaf,
    leaves,
    size_of,
    substituted,
)
from autopar.planner.rules.table import has_rule, rule_of

Parts = tuple[tuple[int, int], ...]


def has_axis(dim: Dim, axis: str) -> bool:
    """Whether an axis occurs in a dim."""
    return any(leaf.name == axis for leaf in leaves(dim))


def is_cuttable(dim: Dim, axis: str) -> bool:
    """Whether a shard of the axis is a shard of the dim: the axis occurs once in each part."""
    if isinstance(dim, Leaf):
        return dim.name == axis
    if isinstance(dim, Concat):
        return all(is_cuttable(part, axis) for part in dim.parts)
    holders = [factor for factor in dim.factors if has_axis(factor, axis)]
    return len(holders) == 1 and is_cuttable(holders[0], axis)


def is_contiguous(dim: Dim, axis: str, batch: int) -> bool:
    """Whether a shard is one block of each part of a dim.

    In a flattened dim, all factors before the axis must have size one.
    """
    if isinstance(dim, Leaf):
        return dim.name == axis
    if isinstance(dim, Concat):
        return all(is_contiguous(part, axis, batch) for part in dim.parts)
    larger = [factor for factor in dim.factors if size_of(factor).at(batch) != 1]
    return bool(larger) and is_contiguous(larger[0], axis, batch)


def axis_size(dim: Dim, axis: str) -> Extent:
    """Return the number of positions of an axis that occurs in a dim."""
    return next(leaf.size for leaf in leaves(dim) if leaf.name == axis)


def parts_of(dim: Dim, axis: str, batch: int) -> Parts:
    """Return how a dim is cut along an axis: consecutive parts, each (blocks, block size).

    Every part has one block for each position of the axis, so all parts are cut at the same
    positions.
    """
    if isinstance(dim, Leaf):
        assert dim.name == axis, f"{axis} does not occur in every part of the dim"
        return ((dim.size.at(batch), 1),)
    if isinstance(dim, Concat):
        return tuple(part for inner in dim.parts for part in parts_of(inner, axis, batch))
    return _product_parts(dim, axis, batch)


def _product_parts(dim: FlattenedDims, axis: str, batch: int) -> Parts:
    """Return the parts of a product: outer factors repeat them, inner ones enlarge their blocks."""
    place = next(i for i, factor in enumerate(dim.factors) if has_axis(factor, axis))
    sizes = [size_of(factor).at(batch) for factor in dim.factors]
    own = parts_of(dim.factors[place], axis, batch)
    inside = prod(sizes[place + 1 :])
    return tuple((count, unit * inside) for count, unit in own) * prod(sizes[:place])


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSplit:
    """Letters that are split together along an axis that all of them contain.

    Usually it is one letter. Letters that are concatenated to one dim, as by `cat`, are split
    together.
    """

    letters: tuple[str, ...]
    axis: str

    @property
    def letter(self) -> str:
        """The first letter, which names the strategy."""
        return self.letters[0]

    def includes(self, dim: Dim | None) -> bool:
        """Whether one of the letters occurs in a dim of the signature."""
        return dim is not None and any(leaf.name in self.letters for leaf in leaves(dim))


def candidates(op: Op, axes: GraphAxes) -> Iterator[tuple[LetterSplit, Extent]]:
    """Yield the splits that an op's rule and its tensors' dims allow, with the axis's size."""
    own = axes.ops[op.name]
    places = (*own.signature.operands, *own.signature.results)
    for group in _groups(places):
        if own.signature.whole.intersection(group) or not all(x in own.letters for x in group):
            continue
        for axis in dict.fromkeys(leaf.name for leaf in leaves(own.letters[group[0]])):
            candidate = LetterSplit(letters=group, axis=axis)
            if _fits(candidate, places, axes, op):
                yield candidate, axis_size(own.letters[group[0]], axis)


def occurrences(
    names: Sequence[str], places: Sequence[tuple[str, Dims]], candidate: LetterSplit
) -> list[int | None]:
    """Return for each tensor the dim with the letters, or None.

    A tensor that occurs twice in the op occurs twice in its signature, in the same order.
    """
    rest = list(places)
    found: list[int | None] = []
    for name in names:
        own = next((place for place in rest if place[0] == name), None)
        if own is not None:
            rest.remove(own)
        dims = own[1] if own is not None else ()
        found.append(next((i for i, dim in enumerate(dims) if candidate.includes(dim)), None))
    return found


def _groups(places: Sequence[tuple[str, Dims]]) -> list[tuple[str, ...]]:
    """Return the letters; letters that are concatenated somewhere are grouped."""
    groups: dict[str, tuple[str, ...]] = {}
    for _, dims in places:
        for dim in dims:
            for leaf in leaves(dim):
                groups.setdefault(leaf.name, (leaf.name,))
            for joined in _concatenated(dim):
                merged = tuple(dict.fromkeys(x for name in joined for x in groups[name]))
                groups.update(dict.fromkeys(merged, merged))
    return list(dict.fromkeys(groups.values()))


def _concatenated(dim: Dim) -> Iterator[tuple[str, ...]]:
    if isinstance(dim, Concat):
        yield tuple(leaf.name for leaf in leaves(dim))
    elif not isinstance(dim, Leaf):
        for factor in dim.factors:
            yield from _concatenated(factor)


def _fits(
    candidate: LetterSplit, places: Sequence[tuple[str, Dims]], axes: GraphAxes, op: Op
) -> bool:
    """Whether each tensor has the letters in at most one dim, which the axis can cut."""
    letters = axes.ops[op.name].letters
    for name, dims in places:
        touched = [i for i, dim in enumerate(dims) if candidate.includes(dim)]
        if len(touched) > 1:
            return False
        for i in touched:
            dim = axes.dims[name][i]
            meant = substituted(dims[i], lambda leaf: letters.get(leaf.name, leaf))
            # after a conflict in inference, the dim differs from the rule's letters
            if not is_cuttable(dim, candidate.axis) or list(leaves(meant)) != list(leaves(dim)):
                return False
    return True


_SUM_REDUCTION = 2  # torch's number of the reduction "sum"


def strategies(
    op: Op, graph: Graph, axes: GraphAxes, *, degree: int, batch: int
) -> tuple[OpLayout, ...]:
    """Return every way to run an op on the ranks of the tensor axis, the simplest first."""
    return Ways.of(op, graph, axes).over(degree=degree, batch=graph.fixed_batch or batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The strategies of an op for all numbers of ranks and rows.

    They are in the order of the module's docstring. Each split has the size of its axis, which must
    not be below the number of ranks.
    """

    whole: OpLayout
    unsplit: tuple[OpLayout, ...]
    splits: tuple[tuple[OpLayout, Extent], ...]

    @classmethod
    def of(cls, op: Op, graph: Graph, axes: GraphAxes) -> Ways:
        """Return the strategies of an op."""
        return _Strategies(op, graph, axes).all()

    def over(self, *, degree: int, batch: int) -> tuple[OpLayout, ...]:
        """Return the strategies for some ranks; one rank splits nothing."""
        if degree == 1:
            return (self.whole,)
        split = (one for one, size in self.splits if size.at(batch) >= degree)
        return tuple(dict.fromkeys((self.whole, *self.unsplit, *split)))


class _Strategies:
    def __init__(self, op: Op, graph: Graph, axes: GraphAxes) -> None:
        self.op, self.graph, self.axes = op, graph, axes
        self.rule = rule_of(op.target)
        self.signature = axes.ops[op.name].signature
        self.arguments = tuple(name for name, value in op.arguments for _ in refs(value))

    def all(self) -> Ways:
        """Return the strategies."""
        unsplit, splits = list[OpLayout](), list[tuple[OpLayout, Extent]]()
        if not self.is_function():
            unsplit.append(self.replicated())
            if not self.is_never_split():
                unsplit += self.partial()
                splits += self.split()
        return Ways(whole=self.whole(), unsplit=tuple(unsplit), splits=tuple(splits))

    def is_function(self) -> bool:
        """Whether the op has, or is in a Function that has, a backward that may be nonlinear."""
        calls, graph = self.graph.calls, self.graph
        if (graph.own_backwards or graph.met_backwards) and not self.op.target.startswith("aten."):
            return True
        return any(calls[call].is_function for call in self.graph.index.around(self.op.call))

    def is_never_split(self) -> bool:
        """Whether the op is unknown, makes a new tensor (`arange`), or writes to memory."""
        if not has_rule(self.op.target) or self.rule.shape is shapes.made:
            return True
        if self.op.writes and self.rule.kind is not OpKind.BATCH_NORM:
            return True
        return self.signature.is_opaque

    # --- not split

    def whole(self) -> OpLayout:
        """Return the strategy in which every rank computes the same, with whole gradients."""
        needs, gives = [WHOLE] * len(self.op.inputs), [WHOLE] * len(self.op.outputs)
        return self._strategy(needs, gives)

    def replicated(self) -> OpLayout:
        """Return the strategy in which every rank computes the same, with partial gradients."""
        return self._strategy(
            list(map(self._unsplit, self.op.inputs)), list(map(self._unsplit, self.op.outputs))
        )

    def partial(self) -> Iterator[OpLayout]:
        """Yield strategies in which partial sums as inputs give partial sums as results."""
        if not all(map(self._is_float, self.op.outputs)) or self.rule.kind.is_loss:
            return
        if self.rule.linear is Linear.FIRST:
            yield from self._passing({0})
        elif self.rule.linear is Linear.JOINTLY and not self._is_affine():
            yield from self._passing(set(range(len(self.arguments))))
        elif self.rule.linear is Linear.EACH:
            added = {i for i in range(len(self.arguments)) if self._is_added(i)}
            for i in range(len(self.arguments)):
                if i not in added and not self._is_parameter(i):
                    yield from self._passing({i} | added)

    def _passing(self, places: set[int]) -> Iterator[OpLayout]:
        inputs = self.op.inputs
        if places and all(self._is_float(inputs[i]) for i in places):
            needs = [PARTIAL if i in places else self._unsplit(n) for i, n in enumerate(inputs)]
            yield self._strategy(needs, [PARTIAL] * len(self.op.outputs))

    def _is_affine(self) -> bool:
        """Whether the op adds a plain number, or pads with one, and so is not linear."""
        number = dict(self.op.arguments).get(self.rule.added)
        return bool(number) and not isinstance(number, Ref)

    # --- split

    def split(self) -> Iterator[tuple[OpLayout, Extent]]:
        """Yield a strategy for each axis in each letter that may be split, and the axis's size."""
        for candidate, size in candidates(self.op, self.axes):
            if not self._is_refused(candidate):
                yield from ((one, size) for one in self._split_along(candidate))

    def _is_refused(self, candidate: LetterSplit) -> bool:
        """Whether this op's arguments exclude a split that its rule allows."""
        given, named = dict(self.op.arguments), self.signature.letters
        if self.rule.kind.is_loss:
            if self.rule.split_form is None or given.get("weight") is not None:
                return True
            # ranks have unequal numbers of valid targets, so their means do not give the mean
            return self._form(candidate) is None and given.get("reduction") != _SUM_REDUCTION
        if self.rule.kind is OpKind.BATCH_NORM:
            # each rank would use the statistics of its own rows
            return bool(given.get("training")) and candidate.includes(named.get("n"))
        if self.rule.kind is OpKind.MEAN:
            # rows of the batch: their number varies by rank, and weights the terms of the loss
            size = axis_size(self.axes.ops[self.op.name].letters[candidate.letter], candidate.axis)
            return not size.is_constant
        if self.rule.kind is OpKind.ATTENTION:
            # a causal mask depends on the positions of the rank's queries
            return bool(given.get("is_causal")) and candidate.includes(named.get("q"))
        return False

    def _split_along(self, candidate: LetterSplit) -> Iterator[OpLayout]:
        form = self._form(candidate)
        found = occurrences(self.op.outputs, self.signature.results, candidate)
        results = dict(zip(self.op.outputs, found, strict=True))
        read = {name: dim for name, dim in results.items() if self._is_read(name)}
        summed = None in read.values()
        if summed:
            if not (form or self._sums()) or not all(map(self._is_float, read)):
                return
            if any(dim is not None for dim in read.values()):
                return
        given = form.gives if form else PARTIAL
        gives = [
            WHOLE if dim is None and name not in read else _layout(candidate, dim, given)
            for name, dim in results.items()
        ]
        needs = [
            _layout(candidate, dim, self._unsplit_operand(i, given if summed else None))
            for i, dim in enumerate(occurrences(self.op.inputs, self.signature.operands, candidate))
        ]
        yield self._strategy(needs, gives, candidate)

    def _unsplit_operand(self, place: int, total: Layout | None) -> Layout:
        """Return the layout of an operand without the letter; `total` is that of sums over it."""
        if total == WHOLE:
            return WHOLE
        if total == PARTIAL and self._is_added(place):
            return PARTIAL
        return self._unsplit(self.op.inputs[place])

    # --- what the op is

    def _form(self, candidate: LetterSplit) -> SplitForm | None:
        return self.rule.form_along(self.signature, candidate.letter)

    def _sums(self) -> bool:
        """Whether the op itself sums over every letter that no result has."""
        kind = self.rule.kind
        return bool(self.rule.contracts) or kind.is_loss or kind is OpKind.SUM

    def _is_read(self, name: str) -> bool:
        """Whether a result is the first, or is read: ops often have others that nothing reads."""
        return name == self.op.outputs[0] or bool(self.graph.index.readers.get(name))

    def _is_added(self, place: int) -> bool:
        return self.arguments[place] == self.rule.added

    def _is_parameter(self, place: int) -> bool:
        return self.graph.tensors[self.op.inputs[place]].origin is TensorOrigin.PARAMETER

    def _is_float(self, name: str) -> bool:
        return not self.graph.tensors[name].is_whole_numbered

    def _unsplit(self, name: str) -> Layout:
        """Return R, the layout with a partial gradient, for a value with a gradient, else I."""
        flows = any(self.graph.tensors[out].requires_grad for out in self.op.outputs)
        return REPLICATED if flows and self.graph.tensors[name].requires_grad else WHOLE

    def _strategy(
        self, needs: list[Layout], gives: list[Layout], candidate: LetterSplit | None = None
    ) -> OpLayout:
        letter, axis = (candidate.letter, candidate.axis) if candidate else ("", "")
        return OpLayout(letter=letter, axis=axis, needs=tuple(needs), gives=tuple(gives))


def _layout(candidate: LetterSplit, dim: int | None, otherwise: Layout) -> Layout:
    return otherwise if dim is None else Layout(LayoutKind.SPLIT, candidate.axis, dim)
