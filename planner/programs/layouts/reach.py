"""Drops the choices that no solution has: layouts that nothing makes, or that nothing can use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.planner.layouts import WHOLE, Layout
from autopar.planner.programs.layouts.problem import Choice

Converts = Callable[[Layout, Layout], bool]


@dataclass(slots=True, kw_only=True)
class Edge:
    """A tensor between the op that makes it, or the layouts of its slot, and the ops of one layer.

    Ends are (node, place); `layouts` is None for what an op makes. Without consumers, it is the
    loss.
    """

    producer: tuple[int, int] | None
    layouts: tuple[Layout, ...] | None
    consumers: tuple[tuple[int, int], ...]
    converts: Converts
    known: dict[tuple[Layout, Layout], bool] = field(default_factory=dict)

    def reaches(self, produced: Layout, needed: Layout) -> bool:
        """Whether one layout becomes the other."""
        pair = (produced, needed)
        if pair not in self.known:
            self.known[pair] = self.converts(produced, needed)
        return self.known[pair]


def reachable(
    choices: Mapping[int, Sequence[Choice]], edges: Sequence[Edge]
) -> dict[int, tuple[Choice, ...]]:
    """Return the choices that are left when each has a partner at both ends of all its edges.

    Nothing that a solution has is dropped: a dropped choice has no partner at some edge.
    """
    left = {node: tuple(own) for node, own in choices.items()}
    changed = True
    while changed:
        changed = False
        for edge in edges:
            for node, kept in _narrowed(edge, left):
                if len(kept) < len(left[node]):
                    left[node], changed = kept, True
    return left


def _narrowed(
    edge: Edge, left: Mapping[int, tuple[Choice, ...]]
) -> list[tuple[int, tuple[Choice, ...]]]:
    found = []
    made = _made(edge, left)
    wanted = [{c.needs[place] for c in left[node]} for node, place in edge.consumers] or [{WHOLE}]
    if edge.producer is not None:
        node, place = edge.producer
        usable = {
            m for m in made if all(any(edge.reaches(m, need) for need in own) for own in wanted)
        }
        found.append((node, tuple(c for c in left[node] if c.gives[place] in usable)))
    having = {need for own in wanted for need in own if any(edge.reaches(m, need) for m in made)}
    found += [
        (node, tuple(c for c in left[node] if c.needs[place] in having))
        for node, place in edge.consumers
    ]
    return found


def _made(edge: Edge, left: Mapping[int, tuple[Choice, ...]]) -> set[Layout]:
    if edge.producer is None:
        return set(edge.layouts or ())
    node, place = edge.producer
    return {choice.gives[place] for choice in left[node]}
