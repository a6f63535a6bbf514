"""The layout program as plain numbers: what can be chosen, and what each choice costs.

Nodes are the ops of one layer of each class, with their choices. Sources are the tensors that they
make, and those that they get from outside or from other layers, by slot. Demands are what the ops
of one layer need of one source, where conversions are paid; keeps are what stays in memory for the
backward.

A tensor that crosses layers has one layout at its slot: the layer that makes it converts it to
that, and the layers that need it see nothing else, so layers of one class stay alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.layouts import WHOLE, Layout, OpLayout
from autopar.planner.ops import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One strategy of an op; its layouts are in the common names of the axes (slots.py)."""

    strategy: OpLayout
    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    seconds: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An op at its place in the layers of one class; its costs count `count` times."""

    op: Op
    layer_class: int
    count: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that an op makes (node, output), or a slot that lies in one of some layouts.

    Layout l of a slot costs seconds[l] and takes weight_bytes[l]: nothing but for parameters.
    """

    tensor: str
    producer: tuple[int, int] | None = None
    layouts: tuple[Layout, ...] = ()
    seconds: tuple[float, ...] = ()
    weight_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the ops of one layer (node, input) need of a source, in `count` layers.

    `crosses` is the slot (a source) in whose layout the tensor leaves the layer, -1 if it stays.
    `seconds` has the conversions that there are, from the produced to the needed layout.
    Needed by nothing, it is the loss, which has to be whole.
    """

    source: int
    tensor: str
    consumers: tuple[tuple[int, int], ...]
    crosses: int
    count: int
    seconds: Mapping[tuple[Layout, Layout], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A tensor kept by some nodes of one layer: in form f it takes saved_bytes[f].

    `forms[k]` has for holder k the form in each of its choices: an axis, or "" for the whole.
    """

    holders: tuple[int, ...]
    forms: tuple[tuple[str, ...], ...]
    saved_bytes: Mapping[str, int]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Some choices of two nodes: if one of the nodes has one of its own, so has the other."""

    first: tuple[int, tuple[int, ...]]
    second: tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All of it."""

    nodes: tuple[Node, ...]
    sources: tuple[Source, ...]
    demands: tuple[Demand, ...]
    keeps: tuple[Keep, ...]
    alike: tuple[Alike, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One choice of each node, and the layout of each slot (−1 for what an op makes)."""

    choices: tuple[int, ...]
    layouts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What an assignment costs, all layers together."""

    seconds: float
    saved_bytes: int
    weight_bytes: int


def totals(problem: Problem, assignment: Assignment) -> Totals | None:
    """Return what an assignment costs, None where it is not allowed.

    That is where a needed conversion does not exist, or nodes that go together do not.
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
    return Totals(
        seconds=seconds, saved_bytes=_saved_bytes(problem, assignment), weight_bytes=weights
    )


def _go_together(assignment: Assignment, alike: Alike) -> bool:
    (i, mine), (j, theirs) = alike.first, alike.second
    return (assignment.choices[i] in mine) == (assignment.choices[j] in theirs)


def _produced(problem: Problem, assignment: Assignment, picked: Sequence[Choice]) -> list[Layout]:
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
