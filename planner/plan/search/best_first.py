"""Searches a tree best first: expands the node of lowest bound until a leaf tops the queue.

Before the first leaf, the deepest node is expanded, unless its bound is far above the lowest. So a
search that is stopped early has a result, and one that goes on has a value to beat.

A node's bound never exceeds the value of a leaf below it. So the first leaf on top is the best one,
and all waiting nodes are pruned by their bounds. Ties go to the simpler leaf, so nodes come before
leaves of equal value.

`simplest_leaf` goes on from there, in the order of complexity, to a leaf near the best one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Generic, TypeVar

_COMING = 15  # entries of the queue that `watch` is given before each expansion
_FAR = 1.25  # times the lowest bound: the search for a first leaf dives to no node above it

Item = TypeVar("Item")
Leaf = TypeVar("Leaf")
Rank = tuple[float, ...]
Complexity = tuple[int, ...]  # less is simpler


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchNode(Generic[Item]):
    """A node that can be expanded; `rank` orders nodes of equal bound, the simpler first.

    `is_deep`: the search for a first leaf may dive to this node. `is_last`: it waits until no other
    node can beat the best leaf. `only_proves`: expanding it can raise the bound, but finds no
    better leaf. A node that is both `is_last` and `only_proves` is dropped if an `Unproved` bound
    is as low as its own, because the overall bound would not rise.
    """

    bound: float
    rank: Rank
    item: Item
    is_deep: bool = True
    is_last: bool = False
    only_proves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLeaf(Generic[Leaf]):
    """A leaf with its exact value."""

    value: float
    rank: Rank
    leaf: Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproved:
    """A lower bound of what remains below a node after limited effort."""

    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[Item, Leaf]):
    """All leaves found, the best first; the waiting nodes; the best possible value."""

    found: tuple[FoundLeaf[Leaf], ...]
    waiting: tuple[SearchNode[Item], ...]  # with the bounds that their parents proved
    bound: float
    is_complete: bool

    @property
    def value(self) -> float:
        """The best leaf's value; infinite if none was found."""
        return self.found[0].value if self.found else float("inf")

    @property
    def gap(self) -> float:
        """The share of the best leaf's value that a better leaf could save at most."""
        best = self.found[0].value
        return max(0.0, best - self.bound) / best if best else 0.0


def never() -> bool:
    """Return False: the search has all the time that it needs."""
    return False


def _is_leaf(entry: object) -> bool:
    return isinstance(entry, FoundLeaf)


def best_first(
    roots: Iterable[SearchNode[Item]],
    expand: Callable[[Item], Iterable[SearchNode[Item] | FoundLeaf[Leaf] | Unproved]],
    *,
    is_late: Callable[[], bool] = never,
    enough: Callable[[int], bool] = lambda leaves_passed: leaves_passed >= 1,
    watch: Callable[[float, Item, Iterable[Item]], None] = lambda _bound, _now, _soon: None,
) -> Outcome[Item, Leaf]:
    """Expand nodes until `enough` accepts how many leaves topped the queue, or time is up.

    Before a node is expanded, `watch` is given three things: the least bound of the node, of the
    queue and of `Unproved` entries (without nodes that are `is_last`), the node's item, and some
    items that come soon. A bound that a parent has already proved holds for its children too.
    """
    queue: list[tuple[float, int, Rank, int, SearchNode[Item] | FoundLeaf[Leaf]]] = []
    dive: list[tuple[int, float, Rank, int]] = []
    last: list[tuple[float, Rank, int]] = []
    # waiting nodes, with their lower bounds and depths
    nodes: dict[int, tuple[SearchNode[Item], float, int]] = {}
    found: list[FoundLeaf[Leaf]] = []
    passed: list[FoundLeaf[Leaf]] = []
    unproved = float("inf")
    numbers = count()

    def push(
        entry: SearchNode[Item] | FoundLeaf[Leaf] | Unproved, parent_bound: float, depth: int
    ) -> None:
        nonlocal unproved
        if isinstance(entry, Unproved):
            unproved = min(unproved, max(entry.bound, parent_bound))
            return
        number = next(numbers)
        if isinstance(entry, FoundLeaf):
            found.append(entry)
            heapq.heappush(queue, (entry.value, 1, entry.rank, number, entry))
            return
        bound = max(entry.bound, parent_bound)
        nodes[number] = entry, bound, depth
        if entry.is_last:
            heapq.heappush(last, (bound, entry.rank, number))
            return
        heapq.heappush(queue, (bound, 0, entry.rank, number, entry))
        if not found and entry.is_deep:
            heapq.heappush(dive, (-depth, bound, entry.rank, number))

    for root in roots:
        push(root, 0.0, 0)
    is_complete = True
    while (queue or last) and not enough(len(passed)):
        if is_late():
            is_complete = bool(passed)
            break
        if not queue or (last and _is_leaf(queue[0][4]) and last[0][0] < queue[0][0]):
            bound, _, number = heapq.heappop(last)
            if nodes[number][0].only_proves and bound >= unproved:
                del nodes[number]
        elif found or not dive or dive[0][1] > _FAR * queue[0][0]:
            _, _, _, number, top = heapq.heappop(queue)
            if isinstance(top, FoundLeaf):
                passed.append(top)
                continue
        else:
            _, _, _, number = heapq.heappop(dive)
        if number in nodes:
            node, bound, depth = nodes.pop(number)
            coming = (entry[3] for entry in sorted(queue[:_COMING]))
            soon = (nodes[number][0].item for number in coming if number in nodes)
            watch(min([bound, unproved, *(entry[0] for entry in queue[:1])]), node.item, soon)
            for child in expand(node.item):
                push(child, bound, depth + 1)
    queue = [entry for entry in queue if isinstance(entry[4], FoundLeaf) or entry[3] in nodes]
    first = passed[0].value if passed else float("inf")
    left = [*(entry[0] for entry in queue), *(entry[0] for entry in last)]
    best_possible = min([first, unproved, *left])
    return Outcome(
        found=tuple(sorted(found, key=lambda leaf: (leaf.value, leaf.rank))),
        waiting=tuple(replace(node, bound=bound) for node, bound, _ in nodes.values()),
        bound=best_possible,
        is_complete=is_complete,
    )


def simplest_leaf(
    found: Iterable[FoundLeaf[Leaf]],
    waiting: Iterable[SearchNode[Item]],
    expand: Callable[[Item], Iterable[SearchNode[Item] | FoundLeaf[Leaf] | Unproved]],
    *,
    of_leaf: Callable[[Leaf], Complexity],
    below: Callable[[Item], Complexity],
    within: float,
    is_late: Callable[[], bool] = never,
) -> FoundLeaf[Leaf]:
    """Return the simplest leaf with a value up to `within`; of equally simple ones, the best.

    `below` returns the least complexity below a node. Nodes and leaves are taken in the order of
    their least complexity. So the first leaf taken is the answer, and nodes that cannot be simpler
    are never expanded. If time is up, the simplest leaf found is returned.
    """
    queue: list[_Entry[Item, Leaf]] = []
    numbers = count()

    def push(one: SearchNode[Item] | FoundLeaf[Leaf], parent_bound: float) -> None:
        value = one.value if isinstance(one, FoundLeaf) else max(one.bound, parent_bound)
        if value <= within:
            of = of_leaf(one.leaf) if isinstance(one, FoundLeaf) else below(one.item)
            heapq.heappush(queue, (of, value, one.rank, next(numbers), one))

    for leaf in found:
        push(leaf, 0.0)
    for node in waiting:
        push(node, 0.0)
    while queue:
        _, bound, _, _, top = heapq.heappop(queue)
        if isinstance(top, FoundLeaf):
            return top
        if not is_late():
            for child in expand(top.item):
                if not isinstance(child, Unproved):
                    push(child, bound)
    raise AssertionError("the fastest is within any tolerance")


_Entry = tuple[Complexity, float, tuple[float, ...], int, SearchNode[Item] | FoundLeaf[Leaf]]
