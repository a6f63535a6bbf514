"""Finds ops that mix the rows of a batch, and random numbers that all rows share.

Also judges backwards that the model's code defines. Such a backward gets the gradients of a part of
the batch. The gradients of rows must depend on their own rows alone, and those of weights must be
sums over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from autopar.planner.findings.loss import (
    Follows,
    all_of_parts,
    counts_rows,
    division_of,
    is_weighed_division,
    loss_of_parts,
)
from autopar.planner.findings.places import grouped_rows, row_places
from autopar.planner.findings.writes import written_buffers
from autopar.planner.graph.graph import BackwardFault, Graph, OwnBackward, once_per_graph
from autopar.planner.graph.ops import BATCH, Extent, Op, Ref, TensorOrigin
from autopar.planner.rules.rule import Linear, OpKind, is_random
from autopar.planner.rules.table import kind_of, rule_out_of_place, takes_statistics


def norm_of_rows(graph: Graph) -> Op | None:
    """Return the first batch norm in training that takes statistics over the rows of a batch.

    Data ranks can share such statistics, because they normalise at the same time. Microbatches
    cannot: the first one is normalised, and perhaps through its backward, before the next begins.
    """
    for op in graph.ops:
        if takes_statistics(op) and _varying(graph, op.inputs[0]):
            return op
    return None


_ALONG = (OpKind.ALONG, OpKind.SOFTMAX, OpKind.SORT, OpKind.ARGSORT)
_TAKING = (OpKind.PART, OpKind.PARTS)


@once_per_graph
def meeting_rows(graph: Graph) -> Op | None:
    """Return the first op that combines rows, for the loss or for a buffer.

    It may compare all pairs of rows (contrastive losses), a row with the next one, or the two
    halves of a batch; use a result of all rows in each row (centering); compute with the number of
    rows, or with their places; take a nonlinear function, such as a root, of a mean or sum over
    rows; write a result of rows to a buffer; or normalise rows by their statistics. torch's own
    batch norms do not count: they share their statistics over all ranks. It may also be an op of a
    backward that the model's code defines.
    """
    of_parts = all_of_parts(graph)
    met = _first_met(graph, graph.ops, of_parts)
    if met is None and of_parts[graph.loss] is Follows.MEETS:
        met = loss_of_parts(graph).op
    return met or next(iter(graph.met_backwards), None)


def _first_met(
    graph: Graph, ops: Iterable[Op], of_parts: Mapping[str, Follows], *, may_count: bool = False
) -> Op | None:
    """Return the first of some ops that combines rows; with `may_count`, they may count rows."""
    grouped, placed = grouped_rows(graph), row_places(graph)
    uses = (_shares_result, _writes_result, *((_uses_row_count,) * (not may_count)))
    for op in ops:
        if op.name in grouped:
            continue
        if op.name in placed.counting | placed.along:
            return op
        if any(by(op, graph) for by in _MEETING) or any(by(op, graph, of_parts) for by in uses):
            return op
    return None


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


def _limits_norms(op: Op, graph: Graph) -> bool:
    """Whether an op limits norms of slices that have elements of several rows."""
    if kind_of(op) is not OpKind.SLICES:
        return False
    shape = graph.tensors[op.inputs[0]].shape
    others = (size for place, size in enumerate(shape) if place != op.number("dim") % len(shape))
    return not all(size.is_constant for size in others)


def _strides_over_rows(op: Op, graph: Graph) -> bool:
    """Whether a view by strides may have elements of several rows in a row."""
    if kind_of(op) is not OpKind.STRIDED or not _varying(graph, op.outputs[0]):
        return False
    (count, *sizes), (rows, *rest) = (
        graph.tensors[name].shape for name in (op.inputs[0], op.outputs[0])
    )
    given = op.argument("stride")
    strides = [one for one in given if isinstance(one, int)] if isinstance(given, tuple) else []
    is_known = rows == count and all(size.is_constant for size in (*sizes, *rest))
    if not is_known or len(strides) != 1 + len(rest):
        return True
    per_row = prod(size.at(1) for size in sizes)
    ends = ((size.at(1) - 1) * stride for size, stride in zip(rest, strides[1:], strict=True))
    return strides[0] != per_row or op.number("storage_offset") + sum(ends) >= per_row


def _varying(graph: Graph, name: str) -> int:
    """Return how many sizes of a tensor depend on the batch."""
    return sum(not size.is_constant for size in graph.tensors[name].shape)


_MEETING = (
    _compares_rows,
    _mixes_rows,
    _divides_by_frequency,
    _normalises_alone,
    _limits_norms,
    _strides_over_rows,
)


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


def squeezing_rows(graph: Graph) -> Op | None:
    """Return the first op that drops the rows' dim if there is only one row."""
    for op in graph.ops:
        if op.target.split(".")[1] in ("squeeze", "squeeze_"):
            shape = graph.tensors[op.inputs[0]].shape
            given = dict(op.arguments).get("dim")
            asked = given if isinstance(given, tuple) else (given,)
            dims = range(len(shape)) if given is None else (d for d in asked if isinstance(d, int))
            if any(not shape[dim].is_constant and shape[dim].at(1) == 1 for dim in dims):
                return op
    return None


# --- backwards that the model's code defines -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBackward:
    """A backward that the model's code defines, as a trace shows it; `why` it cannot, or "".

    `given` pairs results of the forward with the gradients that the backward takes, `made` pairs
    operands with the gradients that it returns ("": none). `ops` are the names of its ops.
    """

    name: str
    where: str
    why: str = ""
    ops: tuple[str, ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    made: tuple[tuple[str, str], ...] = ()


def with_own_backwards(graph: Graph, whole: Graph, traced: Sequence[TracedBackward]) -> Graph:
    """Return a graph with what its own backwards do to rows; `whole` has their ops, too."""
    unread = BackwardFault.UNREAD
    faults = [
        OwnBackward(name=one.name, where=one.where, fault=unread, why=one.why)
        for one in traced
        if one.why
    ]
    whole = _with_counted_gradients(graph, whole, traced)
    buffers = (one.name for one in graph.buffers)
    kept = {op.name for op in graph.index.needed_for([graph.loss, *buffers])}
    reader = _BackwardReader(whole, kept, all_of_parts(whole))
    found = ((one, reader.met(one)) for one in traced if not one.why)
    met = [replace(op, name=f"{op.name} of {own.name}") for own, op in found if op is not None]
    faults += filter(None, map(reader.unscaled, (one for one in traced if not one.why)))
    return replace(graph, own_backwards=tuple(dict.fromkeys(faults)), met_backwards=tuple(met[:1]))


def _with_counted_gradients(graph: Graph, whole: Graph, traced: Sequence[TracedBackward]) -> Graph:
    """Return the whole graph, in which the gradient of a number made of rows is a plain number.

    Other gradients without rows are sums over rows: those of weights.
    """
    of_parts = all_of_parts(graph)
    numbers = {
        gradient: replace(whole.tensors[gradient], origin=TensorOrigin.CONSTANT)
        for one in traced
        for result, gradient in one.given
        if of_parts[result] not in (Follows.ALIKE, Follows.ROWS)
    }
    return replace(whole, tensors=MappingProxyType({**whole.tensors, **numbers}))


@dataclass(frozen=True, slots=True)
class _BackwardReader:
    """Tells what own backwards do; `kept` are the ops of the graph that the loss needs."""

    graph: Graph
    kept: Set[str]
    of_parts: Mapping[str, Follows]

    def met(self, own: TracedBackward) -> Op | None:
        """Return the op of a backward, or of a forward for it alone, in which rows meet, or None.

        A backward of a number, such as a loss, may divide by the number of rows: a mean's does.
        """
        results = {self.of_parts[result] for result, _ in own.given}
        is_of_number = not results <= {Follows.ALIKE, Follows.ROWS}
        ops = [op for op in self._needed(own) if op.name not in self.kept]
        ops += (
            op for op in self.graph.ops if op.name in own.ops and written_buffers(op, self.graph)
        )
        met = _first_met(self.graph, ops, self.of_parts, may_count=is_of_number)
        return met or self._odd(own, is_of_rows=Follows.ROWS in results)

    def _needed(self, own: TracedBackward) -> Sequence[Op]:
        return self.graph.index.needed_for(gradient for _, gradient in own.made if gradient)

    def _odd(self, own: TracedBackward, *, is_of_rows: bool) -> Op | None:
        """Return the op that makes a gradient that parts of a batch would make otherwise, or None.

        The gradient of a weight must be a sum over rows. Any other, such as that of a loss among
        the operands, must be a multiple of a gradient that the backward is given: each microbatch
        adds up what is not, whatever its weight.
        """
        index, given = self.graph.index, [gradient for _, gradient in own.given]
        reached = {*given, *(out for op in index.reached_from(given) for out in op.outputs)}
        for operand, gradient in own.made:
            maker = index.made_by.get(gradient)
            follows = self.of_parts.get(gradient, Follows.SUM)
            if maker is None or "zeros" in maker.target:
                continue
            if self.of_parts[operand] is Follows.ROWS:
                is_odd = not is_of_rows and gradient not in reached
            elif follows is Follows.ALIKE:
                is_odd = gradient not in reached
            else:
                is_odd = follows not in (Follows.SUM, Follows.NEARLY)
            if is_odd:
                return maker
        return None

    def unscaled(self, own: TracedBackward) -> OwnBackward | None:
        """Return the fault of a backward that may not be linear in the gradients given to it."""
        scaled = {gradient for _, gradient in own.given}
        for op in self._needed(own):
            is_new = kind_of(op) in (OpKind.LIKE, OpKind.NEW)
            if op.name in own.ops and not is_new and not scaled.isdisjoint(op.inputs):
                if not _is_linear(op, scaled):
                    fault, why = BackwardFault.UNSCALED, f"computes {op.name}"
                    return OwnBackward(name=own.name, where=op.location, fault=fault, why=why)
                scaled.update(op.outputs)
        return None


def _is_linear(op: Op, scaled: Set[str]) -> bool:
    """Whether an op is linear in those of its inputs that are scaled, as far as the table knows."""
    rule, varying = rule_out_of_place(op.target), [one in scaled for one in op.inputs]
    added = op.given(rule.added)
    if rule.linear is Linear.JOINTLY:
        return all(varying) and (added is None or isinstance(added, Ref))
    if rule.linear is Linear.FIRST or rule.kind is OpKind.DIVISION:
        return varying[0] and not any(varying[1:]) and op.inputs[0] in op.tensors("self", "input")
    return rule.linear is Linear.EACH and varying.count(True) == 1 and added is None
