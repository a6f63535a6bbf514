"""The layout problem as plain numbers: what can be chosen, and what each choice costs.

Nodes are the ops of one layer of each class, with their choices. Sources are the tensors that nodes
make, and slots: tensors from other layers, and parameters. A demand is the use of one source by the
ops of one layer; it pays for conversions. A keep is a tensor that stays in memory for the backward.
Code is the lines that a script prints for the model's Python classes.

A tensor that crosses layers has one layout at its slot. The layer that makes the tensor converts it
to this layout, and later layers see only this layout. So layers of one class stay alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One strategy of an op; `needs` and `gives` use the common names of axes (`Slots`)."""

    strategy: OpLayout
    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    seconds: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNode:
    """An op at one position in the layers of a class, of which there are `count`."""

    op: Op
    layer_class: int
    count: int
    choices: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSource:
    """A tensor that an op makes (node, output), or a slot with its possible layouts.

    Layout l of a slot costs seconds[l] and takes weight_bytes[l]; both are 0 except for parameters,
    of which the slot has `weights`.
    """

    tensor: str
    producer: tuple[int, int] | None = None
    layouts: tuple[Layout, ...] = ()
    seconds: tuple[float, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    weights: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The use of a source by the ops (`consumers`: node, input) of one layer, in `count` layers.

    `crosses` is the slot (a source) in whose layout the tensor leaves the layer, -1 if it stays.
    `seconds` has the possible conversions, from the produced to the needed layout. A source that
    no op needs and that does not cross is the loss, which has to be whole.
    """

    source: int
    tensor: str
    consumers: tuple[tuple[int, int], ...]
    crosses: int
    count: int
    seconds: Mapping[tuple[Layout, Layout], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A tensor that some nodes of one layer (`holders`) keep: in form f it takes saved_bytes[f].

    A form is the axis of a shard, or "" for the whole tensor. `forms[k]` has the form in which
    holder k keeps it, for each of this node's choices.
    """

    holders: tuple[int, ...]
    forms: tuple[tuple[str, ...], ...]
    saved_bytes: Mapping[str, int]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SameChoices:
    """Two nodes, each with some of its choices: either both take one of these, or neither does."""

    first: tuple[int, tuple[int, ...]]
    second: tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The nodes, sources, demands and keeps of a layout problem; `alike` ties choices of nodes."""

    nodes: tuple[LayoutNode, ...]
    sources: tuple[ChoiceSource, ...]
    demands: tuple[Demand, ...]
    keeps: tuple[Keep, ...]
    alike: tuple[SameChoices, ...] = ()

    def class_of(self, demand: Demand) -> int:
        """Return the class of the layer that pays for a demand's conversions; -1 if none does."""
        producer = self.sources[demand.source].producer
        nodes = [node for node, _ in (*demand.consumers, *((producer,) if producer else ()))]
        return self.nodes[nodes[0]].layer_class if nodes else -1

    def in_steps_of(self, microbatches: int) -> Problem:
        """Return the problem with the seconds of gradient sums divided by the microbatches.

        These sums are done once per step.
        """
        sources = (
            replace(one, seconds=tuple(x / microbatches for x in one.seconds))
            for one in self.sources
        )
        return replace(self, sources=tuple(sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCode:
    """Choices of a node for which a script opens a Python class, and prints `lines` more."""

    node: int
    choices: tuple[int, ...]
    classes: tuple[int, ...]
    lines: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertingCode:
    """The Python classes that may convert a demand's tensor for one of its consumers.

    They are in the order in which a script prefers them. `consumer` is a position in the demand's
    consumers; the position after the last one means the slot in whose layout the tensor leaves the
    layer, or the loss.
    """

    demand: int
    consumer: int
    classes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedCode:
    """The lines that a script prints: the model's Python class k takes lines[k] if it is opened.

    `demand_lines` are the lines of one conversion of each demand, `slot_lines` those of each slot
    in a layout other than I. A conversion from one split to another takes twice the lines, because
    it names both dims.
    """

    lines: tuple[float, ...]
    changed: tuple[ChangedCode, ...]
    converting: tuple[ConvertingCode, ...]
    demand_lines: tuple[float, ...]
    slot_lines: tuple[float, ...]

    def conversion_lines(self, demand: int, start: Layout, end: Layout) -> float:
        """Return the lines of a conversion."""
        if start == end:
            return 0.0
        is_exchange = start.kind is end.kind is LayoutKind.SPLIT
        return self.demand_lines[demand] * (1 + is_exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One choice of each node, and the layout of each slot (−1 for a tensor that an op makes)."""

    choices: tuple[int, ...]
    layouts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentTotals:
    """The costs of an assignment, summed over all layers."""

    seconds: float
    saved_bytes: int
    weight_bytes: int


def totals(problem: Problem, assignment: Assignment) -> AssignmentTotals | None:
    """Return the costs of an assignment, or None if it is not allowed.

    It is not allowed if a needed conversion does not exist, or if it breaks a `SameChoices`.
    """
    if not all(_go_together(assignment, one) for one in problem.alike):
        return None
    picked = [n.choices[c] for n, c in zip(problem.nodes, assignment.choices, strict=True)]
    produced = _produced(problem, assignment, picked)
    seconds = sum(node.count * c.seconds for node, c in zip(problem.nodes, picked, strict=True))
    weights = 0
    for source, place in zip(problem.sources, assignment.layouts, strict=True):
        if place >= 0:
            seconds += source.seconds[place]
            weights += source.weight_bytes[place]
    for demand in problem.demands:
        needed = {picked[node].needs[place] for node, place in demand.consumers}
        needed |= {produced[demand.crosses]} if demand.crosses >= 0 else set()
        for layout in needed or {WHOLE}:
            cost = demand.seconds.get((produced[demand.source], layout))
            if cost is None:
                return None
            seconds += demand.count * cost
    return AssignmentTotals(
        seconds=seconds, saved_bytes=_saved_bytes(problem, assignment), weight_bytes=weights
    )


def _go_together(assignment: Assignment, alike: SameChoices) -> bool:
    (i, mine), (j, theirs) = alike.first, alike.second
    return (assignment.choices[i] in mine) == (assignment.choices[j] in theirs)


def _produced(problem: Problem, assignment: Assignment, picked: Sequence[Strategy]) -> list[Layout]:
    return [
        source.layouts[layout]
        if source.producer is None
        else picked[source.producer[0]].gives[source.producer[1]]
        for source, layout in zip(problem.sources, assignment.layouts, strict=True)
    ]


def _saved_bytes(problem: Problem, assignment: Assignment) -> int:
    own = sum(
        node.count * node.choices[choice].saved_bytes
        for node, choice in zip(problem.nodes, assignment.choices, strict=True)
    )
    for keep in problem.keeps:
        forms = {
            forms[assignment.choices[node]]
            for node, forms in zip(keep.holders, keep.forms, strict=True)
        }
        own += keep.count * sum(keep.saved_bytes[form] for form in forms)
    return own


def printed_lines(problem: Problem, code: PrintedCode, assignment: Assignment) -> float:
    """Return the lines that a script prints for an assignment.

    A conversion that several classes may print is printed in one that is opened anyway; if there is
    none, the first of them is opened.
    """
    picked = [n.choices[c] for n, c in zip(problem.nodes, assignment.choices, strict=True)]
    produced = _produced(problem, assignment, picked)
    changed = [one for one in code.changed if assignment.choices[one.node] in one.choices]
    needs = [one.classes for one in changed]
    converted: dict[tuple[int, Layout], float] = {}
    for one in code.converting:
        demand = problem.demands[one.demand]
        needed = _needed_layout(demand, one.consumer, picked, produced)
        if needed != produced[demand.source]:
            lines = code.conversion_lines(one.demand, produced[demand.source], needed)
            converted[one.demand, needed] = lines
            needs.append(one.classes)
    opened: set[int] = set()
    for classes in sorted(needs, key=len):
        if opened.isdisjoint(classes):
            opened.add(classes[0])
    held = zip(problem.sources, assignment.layouts, code.slot_lines, strict=True)
    return (
        sum(code.lines[one] for one in opened)
        + sum(one.lines for one in changed)
        + sum(converted.values())
        + sum(lines for one, at, lines in held if at >= 0 and one.layouts[at] != WHOLE)
    )


def _needed_layout(
    demand: Demand, consumer: int, picked: Sequence[Strategy], produced: Sequence[Layout]
) -> Layout:
    if consumer < len(demand.consumers):
        node, place = demand.consumers[consumer]
        return picked[node].needs[place]
    return produced[demand.crosses] if demand.crosses >= 0 else WHOLE
