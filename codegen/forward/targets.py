"""Prints functions that count a batch's targets, and compute what the loss divides by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.opened import bind_batch, function_source
from autopar.codegen.forward.opening import Opening
from autopar.codegen.forward.opening.opener import open_calls
from autopar.codegen.forward.reading.forward_source import LOSS, CallTree
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.codegen.forward.writing import written
from autopar.codegen.text.expressions import (
    Binding,
    Expression,
    Fact,
    LocalTensor,
    binary,
    call,
    indexed,
    joined,
    literal,
    method,
    text,
)
from autopar.codegen.text.lines import Line
from autopar.planner.findings.loss import (
    Division,
    Follows,
    all_of_parts,
    counted_by,
    division_of,
    is_known_from_batch,
    is_weighed_division,
    steps_from_batch,
)
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE
from autopar.planner.graph.ops import Op, TensorOrigin
from autopar.planner.rules import shapes
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of

DIVISOR = "divisor"  # the script's function that returns the loss's divisor
_COUNTS, _PARTS = "counts", "parts"  # its parameters


def valid_targets(split: SplitGraph, tree: CallTree) -> str | None:
    """Return the source of `valid_targets(batch)`, or None if the loss has no mean over targets.

    The function returns the number of targets in the mean, or one number for each mean if the loss
    adds several. If a mean's divisor is computed from several counts, the function returns these
    counts.
    """
    graph, terms = split.graph, _terms(split)
    counted = _counted(graph, terms)
    steps = steps_from_batch(graph, [name for names in counted.values() for name in names])
    if not terms or steps is None:
        return None
    read = {name for op in steps for name in op.inputs}.union(*counted.values())
    builder = _CountBuilder(_opened_for(steps, split, tree), frozenset(read))
    bind_batch(builder)
    order_free = _order_free(graph, steps)
    for op in steps:
        if kind_of(op).keeps_entries and order_free.issuperset(op.outputs):
            builder.alias(op)
        else:
            builder.add(op)
    counts = [one for term in terms for one in _counts(term, counted[term.name], builder)]
    is_one = len(counts) == 1 and not split.weighed
    result = counts[0] if is_one else call("torch.stack", joined(tuple(counts)))
    does = "Count the targets in the batch that the loss averages over."
    head = "def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:"
    lines = written(builder.body(result), builder.owner, indent=4)
    return function_source([head], does, lines)


def printed_divisor(split: SplitGraph, tree: CallTree) -> str | None:
    """Return the source of `divisor(counts, parts)`, or None if the loss divides by the counts.

    The function returns the loss's divisor, from counts summed over `parts` parts of a batch.
    """
    graph, terms = split.graph, _terms(split)
    follows = all_of_parts(graph)
    divisions = [division_of(graph, op) for op in terms]
    if not any(one is not None and _changes(one, follows, graph) for one in divisions):
        return None
    steps = [op for one in divisions if one is not None for op in one.steps]
    builder = _CountBuilder(_opened_for(steps, split, tree), frozenset())
    numbers = iter(range(len(terms) + sum(len(one.counts) for one in divisions if one is not None)))
    is_one = not split.weighed and all(one is None or len(one.counts) == 1 for one in divisions)
    names = (_COUNTS if is_one else f"{_COUNTS}[..., {number}]" for number in numbers)
    values = [_divisor(division, names, follows, builder) for division in divisions]
    last = (("dim", literal(-1)),)
    several = bool(split.weighed)
    result = call("torch.stack", joined(tuple(values)), keywords=last) if several else values[0]
    head = f"def {DIVISOR}({_COUNTS}: Tensor, {_PARTS}: float) -> Tensor:"
    does = "Return the divisor of the loss, from counts summed over `parts` parts of a batch."
    lines = written(builder.body(result), builder.owner, indent=4)
    return function_source([head], does, lines)


def _changes(division: Division, follows: Mapping[str, Follows], graph: Graph) -> bool:
    """Whether a loss divides by something other than its single count."""
    if len(division.counts) > 1 or not all(_only_casts(op, graph) for op in division.steps):
        return True
    return follows[division.counted] is not follows[division.counts[0]]


def _only_casts(op: Op, graph: Graph) -> bool:
    """Whether an op only casts or views floats: divisor() skips it, as its counts are float64."""
    return kind_of(op).keeps_entries and not graph.tensors[op.outputs[0]].is_whole_numbered


def _divisor(
    division: Division | None,
    names: Iterator[str],
    follows: Mapping[str, Follows],
    builder: _CountBuilder,
) -> Expression:
    """Return a mean's divisor, taking its counts from `names`."""
    if division is None:
        return text(next(names))
    parts = text(_PARTS)
    for count, name in zip(division.counts, names, strict=False):
        local = LocalTensor(count, WHOLE)
        if follows[count] is Follows.MEAN:
            mean = binary(text(name), "/", parts, Binding.PRODUCT)
            builder.add_line(Line(results=local, expression=mean, names=(("mean",),)))
        else:
            builder.bind(local, name)
    for op in division.steps:
        if op.outputs[0] in builder.have:
            continue  # another mean divides by it, too
        if _only_casts(op, builder.graph):
            builder.alias(op)
        else:
            builder.add(op)
    value = builder.value(division.divisor, WHOLE)
    is_mean = follows[division.counted] is Follows.MEAN
    return binary(value, "*", parts, Binding.PRODUCT) if is_mean else value


def _opened_for(steps: Iterable[Op], split: SplitGraph, tree: CallTree) -> Opening:
    """Return an opening in which the printed loss contains these ops, and nothing is split."""
    calls = {call for op in steps for call in tree.chain(op)} - {LOSS}
    whole = replace(split, degree=1, ops={}, gives={}, crossing={}, weighed=())
    return open_calls(whole, tree, opened=[LOSS], inlined=sorted(calls))


def _order_free(graph: Graph, steps: Iterable[Op]) -> set[str]:
    """Return the tensors whose readers do not depend on the order of entries."""
    steps = tuple(steps)
    order_free = {name for op in steps for name in (*op.inputs, *op.outputs)}
    for op in reversed(steps):
        rule = rule_of(op.target)
        made = next(iter(op.outputs), "")
        keeps = rule.kind.keeps_entries or rule.shape is shapes.elementwise
        is_of_all = rule.kind is OpKind.SUM and not graph.tensors[made].shape
        if len(op.inputs) > 1 or not ((keeps and made in order_free) or is_of_all):
            order_free -= set(op.inputs)
    return order_free


def _terms(split: SplitGraph) -> list[Op]:
    loss = counted_loss(split.graph)
    ops = split.graph.ops
    return [op for op in ops if op.name in split.weighed] if loss is None else [loss]


class _CountBuilder(BodyBuilder):
    """Prints code that has a batch, but no module from which to read a dtype or device."""

    def __init__(self, opening: Opening, read: frozenset[str]) -> None:
        super().__init__(opening, LOSS)
        self.read = read
        for name in sorted(read):
            if self.graph.tensors[name].origin is TensorOrigin.CONSTANT:
                local = LocalTensor(name, WHOLE)
                numbers = self.owned(name, None)
                self.add_line(Line(results=local, expression=numbers, hint="weight"))

    def dtype(self) -> None:
        """Return None: tensors are made without a dtype, so torch's default applies."""

    def device(self) -> Expression | None:
        """Return the device of the batch's tensors."""
        local = next((local for local in self.values() if local.tensor in self.read), None)
        return None if local is None else Fact(local, "device")


def _counts(term: Op, counted: tuple[str, ...], builder: BodyBuilder) -> tuple[Expression, ...]:
    """Return a mean's counts: valid targets, the mask's true entries, or numbers in its divisor."""
    values = tuple(builder.value(name, WHOLE) for name in counted)
    if not kind_of(term).is_class_loss:
        counter = builder.graph.tensors[counted[0]]
        if not counter.shape:
            return values
        return (method(values[0], "sum" if counter.dtype == "bool" else "count_nonzero"),)
    number, *weights = values
    ignored = term.argument("ignore_index")
    assert isinstance(ignored, int)
    is_valid = binary(number, "!=", literal(ignored), Binding.COMPARISON)
    if not weights:
        return (method(is_valid, "sum"),)
    of_classes = method(weights[0], "double")  # float64, so that sums are exact
    return (method(indexed(of_classes, indexed(number, is_valid)), "sum"),)


def counted_loss(graph: Graph) -> Op | None:
    """Return the op that is the loss, if it is a mean over counted entries of the batch."""
    maker = graph.index.made_by.get(graph.loss)
    return maker if maker is not None and _counted(graph, [maker]) else None


def weighed_terms(graph: Graph) -> tuple[Op, ...]:
    """Return the means over counted entries, unless the loss is exactly one of them."""
    if counted_loss(graph) is not None:
        return ()
    counted = _counted(graph, graph.ops)
    return tuple(op for op in graph.ops if op.name in counted)


def _counted(graph: Graph, ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """Return the tensors that each mean counts: targets and class weights, a mask, or numbers."""
    follows = all_of_parts(graph)
    pairs = ((op.name, _counted_by(op, graph, follows)) for op in ops)
    return {name: counted for name, counted in pairs if counted}


def _counted_by(op: Op, graph: Graph, follows: Mapping[str, Follows]) -> tuple[str, ...]:
    division = division_of(graph, op)
    if division is not None:
        return division.counts if is_weighed_division(op, graph, follows) else ()
    names = counted_by(op, graph)
    return names if names and is_known_from_batch(graph, names) else ()
