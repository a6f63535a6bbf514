"""Prints by how much a batch counts in the mean of the loss: sliced from the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.codegen.forward.body import BodyBuilder
from autopar.codegen.forward.losses import bind_batch
from autopar.codegen.forward.opening.opener import open_calls
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import LOSS, CallTree
from autopar.codegen.forward.reading.split import Split
from autopar.codegen.forward.text.expressions import (
    Expression,
    Fact,
    Held,
    Level,
    binary,
    call,
    indexed,
    joined,
    method,
)
from autopar.codegen.forward.text.lines import Line
from autopar.codegen.forward.text.literals import literal
from autopar.codegen.forward.writing.writer import Style, written
from autopar.planner.findings.counting import (
    counted_by,
    division_of,
    is_told,
    steps_from_batch,
)
from autopar.planner.findings.loss_of_parts import Follows, all_of_parts, is_weighed_division
from autopar.planner.graph import Graph
from autopar.planner.layouts import WHOLE
from autopar.planner.ops import Op, Origin
from autopar.planner.rules import shapes
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of


def valid_targets(split: Split, tree: CallTree) -> str | None:
    """Return the source of `valid_targets(batch)`, or None where the loss has no such mean.

    It gives the number of targets of a loss that is one mean, and the numbers of all the weighed
    means where the loss adds several terms up; where a mean divides by a number of its own, that.
    """
    graph, terms = split.graph, _terms(split)
    counted = _counted(graph, terms)
    steps = steps_from_batch(graph, [name for names in counted.values() for name in names])
    if not terms or steps is None:
        return None
    calls = {call for op in steps for call in tree.chain(op)} - {LOSS}
    whole = replace(split, degree=1, ops={}, gives={}, crossing={}, weighed=())
    opening = open_calls(whole, tree, opened=[LOSS], inlined=sorted(calls))
    read = {name for op in steps for name in op.inputs}.union(*counted.values())
    builder = _CountBuilder(opening, frozenset(read))
    unplaced = _unplaced(graph, steps)
    for op in steps:
        if kind_of(op).keeps_entries and unplaced.issuperset(op.outputs):
            builder.alias(op)
        else:
            builder.add(op)
    counts = [_count(term, counted[term.name], builder) for term in terms]
    result = call("torch.stack", joined(tuple(counts))) if split.weighed else counts[0]
    typed = frozenset(builder.arguments.values())
    style = Style(typed=typed, returns="Tensor", axis="", indent=4)
    return (
        "\n".join(
            [
                "def valid_targets(batch: Mapping[str, Tensor]) -> Tensor:",
                '    """Return how much of the batch counts in the mean of the loss."""',
                *written(builder.body(result), builder.owner, style),
            ]
        )
        + "\n"
    )


def _unplaced(graph: Graph, steps: Iterable[Op]) -> set[str]:
    """Return the tensors of which nothing that reads them asks which entry lies where."""
    steps = tuple(steps)
    unplaced = {name for op in steps for name in (*op.inputs, *op.outputs)}
    for op in reversed(steps):
        rule = rule_of(op.target)
        made = next(iter(op.outputs), "")
        keeps = rule.kind.keeps_entries or rule.shape is shapes.elementwise
        is_of_all = rule.kind is OpKind.SUM and not graph.tensors[made].shape
        if len(op.inputs) > 1 or not ((keeps and made in unplaced) or is_of_all):
            unplaced -= set(op.inputs)
    return unplaced


def added_to_counts(split: Split) -> tuple[float, ...]:
    """Return what the loss adds to each count before it divides; () where it adds nothing."""
    divisions = (division_of(split.graph, op) for op in _terms(split))
    added = tuple(0.0 if one is None else one.added for one in divisions)
    return added if any(added) else ()


def _terms(split: Split) -> list[Op]:
    loss = counted_loss(split.graph)
    ops = split.graph.ops
    return [op for op in ops if op.name in split.weighed] if loss is None else [loss]


class _CountBuilder(BodyBuilder):
    """Prints code that has a batch at hand and no module, whose type or device it could take."""

    def __init__(self, opening: Opening, read: frozenset[str]) -> None:
        super().__init__(opening, LOSS)
        self.read = read
        bind_batch(self)
        for name in sorted(read):
            if self.graph.tensors[name].origin is Origin.CONSTANT:
                held = Held(name, WHOLE)
                numbers = self.owned(name, None)
                self.add_line(Line(results=held, expression=numbers, hint="weight"))

    def dtype(self) -> None:
        """Leave numbers in float32, as the model's training has them."""

    def device(self) -> Expression | None:
        """Return the device of what is read of the batch."""
        held = next((held for held in self.values() if held.tensor in self.read), None)
        return None if held is None else Fact(held, "device")


def _count(term: Op, counted: tuple[str, ...], builder: BodyBuilder) -> Expression:
    number, *weights = (builder.value(name, WHOLE) for name in counted)
    if not kind_of(term).is_class_loss:
        counter = builder.graph.tensors[counted[0]]
        is_count = not counter.shape
        return (
            number
            if is_count
            else method(number, "sum" if counter.dtype == "bool" else "count_nonzero")
        )
    ignored = term.argument("ignore_index")
    assert isinstance(ignored, int)
    is_valid = binary(number, "!=", literal(ignored), Level.COMPARISON)
    if not weights:
        return method(is_valid, "sum")
    of_classes = method(weights[0], "double")  # their sums are exact, as those of other fractions
    return method(indexed(of_classes, indexed(number, is_valid)), "sum")


def counted_loss(graph: Graph) -> Op | None:
    """Return the op that is the loss, where it is a mean over what counts of the batch."""
    maker = graph.index.made_by.get(graph.loss)
    return maker if maker is not None and _counted(graph, [maker]) else None


def weighed_terms(graph: Graph) -> tuple[Op, ...]:
    """Return the means over what counts of the batch, where the loss is more than one of them."""
    if counted_loss(graph) is not None:
        return ()
    counted = _counted(graph, graph.ops)
    return tuple(op for op in graph.ops if op.name in counted)


def _counted(graph: Graph, ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """Return what each mean counts by: targets, and class weights; or a mask; or a number."""
    follows = all_of_parts(graph)
    pairs = ((op.name, _counted_by(op, graph, follows)) for op in ops)
    return {name: counted for name, counted in pairs if counted}


def _counted_by(op: Op, graph: Graph, follows: Mapping[str, Follows]) -> tuple[str, ...]:
    division = division_of(graph, op)
    if division is not None:
        return (division.count,) if is_weighed_division(op, graph, follows) else ()
    names = counted_by(op, graph)
    return names if names and is_told(graph, names) else ()
