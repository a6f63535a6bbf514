"""Lists the strategies of one op: the layouts that its inputs need and those its results get.

Why each is right, with x the inputs, y the results, gx and gy their gradients, per rank r:

    whole        x I, y I: every rank does the same; gy is whole, so gx is.
    replicated   x R, y R: the backward is linear in gy, so the partial sums gy_r make partial sums
                 gx_r. All inputs with gradient are R: one in I would get a partial gradient.
    partial      f linear in x jointly: Σ f(x_r) = f(Σ x_r), and gx = fᵀ(gy) is whole on every rank.
                 f(a, b) bilinear, a partial: Σ f(a_r, b) = f(Σ a_r, b); ga is whole, but gb is made
                 from a_r, so it is a partial sum: b is R. What is added (a bias) is P too: in any
                 other layout every rank would add it.
    split        a letter of the op's rule, along an axis of the model that lies in it. What has the
                 letter is S. A result without it is a sum over it, so P. An input without it meets
                 only a part of the positions, so its gradient is a partial sum: R; but what is
                 added to a partial result is P.

A tensor without gradient is never R: I says the same of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.planner.axes.infer import Axes
from autopar.planner.graph import Graph
from autopar.planner.layouts import PARTIAL, REPLICATED, WHOLE, Kind, Layout, OpLayout
from autopar.planner.ops import Op, Origin, Ref, refs
from autopar.planner.programs.layouts.letters import Candidate, candidates, occurrences
from autopar.planner.rules import shapes
from autopar.planner.rules.rule import Linear, OpKind
from autopar.planner.rules.table import has_rule, rule_of

_SUM_REDUCTION = 2


def strategies(
    op: Op, graph: Graph, axes: Axes, *, degree: int, batch: int
) -> tuple[OpLayout, ...]:
    """Return every way to run an op on the ranks of the tensor axis, the simplest first."""
    return _Strategies(op, graph, axes, degree=degree, batch=batch).all()


class _Strategies:
    def __init__(self, op: Op, graph: Graph, axes: Axes, *, degree: int, batch: int) -> None:
        self.op, self.graph, self.axes = op, graph, axes
        self.degree, self.batch = degree, batch
        self.rule = rule_of(op.target)
        self.signature = axes.ops[op.name].signature
        self.arguments = tuple(name for name, value in op.arguments for _ in refs(value))

    def all(self) -> tuple[OpLayout, ...]:
        """Return them in the order of the docstring above, each once; one rank splits nothing."""
        found = [self.whole()]
        if self.degree > 1 and not self.is_function():
            found.append(self.replicated())
            if not self.is_closed():
                found += [*self.partial(), *self.split()]
        return tuple(dict.fromkeys(found))

    def is_function(self) -> bool:
        """A custom backward need not be linear in the gradient that it is given."""
        calls = self.graph.calls
        return any(calls[call].is_function for call in self.graph.index.around(self.op.call))

    def is_closed(self) -> bool:
        """Whether nothing is known of the op, or it writes where others read."""
        if not has_rule(self.op.target) or self.rule.shape is shapes.made:
            return True
        if self.op.writes and self.rule.kind is not OpKind.BATCH_NORM:
            return True
        return self.signature.is_opaque

    # --- not split

    def whole(self) -> OpLayout:
        """The same on every rank, gradients whole."""
        needs, gives = [WHOLE] * len(self.op.inputs), [WHOLE] * len(self.op.outputs)
        return self._strategy(needs, gives)

    def replicated(self) -> OpLayout:
        """The same on every rank, gradients partial sums."""
        return self._strategy(
            list(map(self._unsplit, self.op.inputs)), list(map(self._unsplit, self.op.outputs))
        )

    def partial(self) -> Iterator[OpLayout]:
        """Partial sums that pass through."""
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
        """A sum with a plain number, or a padding with one, is not linear."""
        number = dict(self.op.arguments).get(self.rule.added)
        return bool(number) and not isinstance(number, Ref)

    # --- split

    def split(self) -> Iterator[OpLayout]:
        """One strategy for each axis in each letter that may be split."""
        for candidate in candidates(
            self.op, self.graph, self.axes, degree=self.degree, batch=self.batch
        ):
            if self.rule.kind.is_loss:
                yield from self._split_loss(candidate)
            elif not self._is_refused(candidate):
                yield from self._split_along(candidate)

    def _is_refused(self, candidate: Candidate) -> bool:
        """Letters that the rule leaves open, but this op's arguments do not."""
        given, named = dict(self.op.arguments), self.signature.letters
        if self.rule.kind is OpKind.BATCH_NORM:
            # each rank would see the statistics of its own rows
            return bool(given.get("training")) and candidate.includes(named.get("n"))
        if self.rule.kind is OpKind.ATTENTION:
            # a causal mask would have to know which rows the rank has
            return bool(given.get("is_causal")) and candidate.includes(named.get("q"))
        return False

    def _split_along(self, candidate: Candidate) -> Iterator[OpLayout]:
        found = occurrences(self.op.outputs, self.signature.results, candidate)
        results = dict(zip(self.op.outputs, found, strict=True))
        read = {name: dim for name, dim in results.items() if self._is_read(name)}
        summed = None in read.values()
        if summed:
            if not self._sums() or not all(map(self._is_float, read)):
                return
            if any(dim is not None for dim in read.values()):
                return
        gives = [
            WHOLE if dim is None and name not in read else _layout(candidate, dim, PARTIAL)
            for name, dim in results.items()
        ]
        needs = [
            _layout(candidate, dim, self._without_letter(i, summed=summed))
            for i, dim in enumerate(occurrences(self.op.inputs, self.signature.operands, candidate))
        ]
        yield self._strategy(needs, gives, candidate)

    def _without_letter(self, place: int, *, summed: bool) -> Layout:
        if summed and self._is_added(place):
            return PARTIAL
        return self._unsplit(self.op.inputs[place])

    def _split_loss(self, candidate: Candidate) -> Iterator[OpLayout]:
        """The vocabulary-parallel loss, or rows where the loss is a sum.

        A mean over rows is not split: its parts are means over unequal numbers of valid targets.
        """
        given = dict(self.op.arguments)
        if self.rule.kind is not OpKind.CROSS_ENTROPY or given.get("weight") is not None:
            return
        logits = occurrences(self.op.inputs, self.signature.operands, candidate)
        if candidate.includes(self.signature.letters.get("v")):
            # The runtime's loss sums over the ranks itself: the result is whole, and so is the
            # gradient that it is given.
            yield self._strategy(
                [_layout(candidate, dim, WHOLE) for dim in logits], [WHOLE], candidate
            )
        elif given.get("reduction") == _SUM_REDUCTION:
            yield from self._split_along(candidate)

    # --- what the op is

    def _sums(self) -> bool:
        """Whether it sums over a letter that no result has. The parts of a mean would be means."""
        kind = self.rule.kind
        return bool(self.rule.contracts) or kind.is_loss or kind is OpKind.SUM or kind.reads_table

    def _is_read(self, name: str) -> bool:
        """Whether anything takes a result: ops of ATen give more than people ask for."""
        return name == self.op.outputs[0] or bool(self.graph.index.readers.get(name))

    def _is_added(self, place: int) -> bool:
        return self.arguments[place] == self.rule.added

    def _is_parameter(self, place: int) -> bool:
        return self.graph.tensors[self.op.inputs[place]].origin is Origin.PARAMETER

    def _is_float(self, name: str) -> bool:
        return not self.graph.tensors[name].is_whole_numbered

    def _unsplit(self, name: str) -> Layout:
        """The same value on every rank, the gradient (if there is one) a partial sum."""
        flows = any(self.graph.tensors[out].requires_grad for out in self.op.outputs)
        return REPLICATED if flows and self.graph.tensors[name].requires_grad else WHOLE

    def _strategy(
        self, needs: list[Layout], gives: list[Layout], candidate: Candidate | None = None
    ) -> OpLayout:
        letter, axis = (candidate.letter, candidate.axis) if candidate else ("", "")
        return OpLayout(letter=letter, axis=axis, needs=tuple(needs), gives=tuple(gives))


def _layout(candidate: Candidate, dim: int | None, otherwise: Layout) -> Layout:
    return otherwise if dim is None else Layout(Kind.SPLIT, candidate.axis, dim)
