"""Searches a tree best first: expands the node of lowest bound until a leaf tops the queue.

Before the first leaf, the deepest node is expanded, unless its bound is far above the lowest. So a
search that is stopped early has a result, and one that goes on has a value to beat.

A node's bound never exceeds the value of a leaf below it. So the first leaf on top is the best one,
and all waiting nodes are pruned by their bounds. Ties go to the simpler leaf, so nodes come before
leaves of equal value. Then the simplest leaf near the best one is found among what is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Generic, TypeVar

from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.costs.prediction import Arrangement, Compile
from autopar.planner.plan.solving.candidate import Candidate, recomputes
from autopar.planner.precision import Compression

_FAR = 1.25  # times the lowest bound: the search for a first leaf dives to no node above it

Item = TypeVar("Item")
Leaf = TypeVar("Leaf")
Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchNode(Generic[Item]):
    """A node that can be expanded; `rank` orders nodes of equal bound, the simpler first.

    `is_deep`: the search for a first leaf may dive to this node. `is_last`: it waits until no other
    node can beat the best leaf. `only_proves`: expanding it can raise the bound, and finds no
    better leaf. An `is_last` node of this kind is dropped if an `Unproved` bound is as low as its
    own, because the overall bound would not rise.
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
    def gap(self) -> float:
        """The share of the best leaf's value that a better leaf could save at most."""
        best = self.found[0].value
        return max(0.0, best - self.bound) / best if best else 0.0


def _is_leaf(entry: object) -> bool:
    return isinstance(entry, FoundLeaf)


def best_first(
    roots: Iterable[SearchNode[Item]],
    expand: Callable[[Item], Iterable[SearchNode[Item] | FoundLeaf[Leaf] | Unproved]],
    *,
    is_late: Callable[[], bool] = lambda: False,
    enough: Callable[[int], bool] = lambda leaves_passed: leaves_passed >= 1,
    watch: Callable[[float], None] = lambda _: None,
) -> Outcome[Item, Leaf]:
    """Expand nodes until `enough` accepts how many leaves topped the queue, or time is up.

    Before a node is expanded, `watch` is given the least bound of the node, the queue and what is
    unproved; nodes that are `is_last` are not counted. A bound that a parent has already proved
    holds for its children too.
    """
    queue: list[tuple[float, int, Rank, int, SearchNode[Item] | FoundLeaf[Leaf]]] = []
    dive: list[tuple[int, float, Rank, int]] = []
    last: list[tuple[float, Rank, int]] = []
    nodes: dict[
        int, tuple[SearchNode[Item], float, int]
    ] = {}  # waiting nodes, with their lower bounds and depths
    found: list[FoundLeaf[Leaf]] = []
    passed: list[FoundLeaf[Leaf]] = []
    unproved = float("inf")
    numbers = count()

    def push(
        entry: SearchNode[Item] | FoundLeaf[Leaf] | Unproved, floor: float, depth: int
    ) -> None:
        nonlocal unproved
        if isinstance(entry, Unproved):
            unproved = min(unproved, max(entry.bound, floor))
            return
        number = next(numbers)
        if isinstance(entry, FoundLeaf):
            found.append(entry)
            heapq.heappush(queue, (entry.value, 1, entry.rank, number, entry))
            return
        bound = max(entry.bound, floor)
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
            watch(min([bound, unproved, *(entry[0] for entry in queue[:1])]))
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


Complexity = tuple[int, ...]  # less is simpler


def complexity(arrangement: Arrangement, *, recomputes: bool) -> Complexity:
    """Return how hard a plan is to read and to trust, most important first.

    In this order: how many kinds of parallelism there are; how many of them need printed forwards
    (pipeline and tensor: data ranks run the model's own forward); the ZeRO level; whether the host
    has the optimizer; how gradients are compressed; whether a layer is recomputed; whether layers
    are compiled.
    """
    opening = (arrangement.pipeline > 1) + (arrangement.tensor > 1)
    return (
        opening + (arrangement.data > 1),
        opening,
        arrangement.zero.value,
        int(arrangement.offload.has_states),
        [*Compression].index(arrangement.compression),
        int(recomputes),
        int(arrangement.compile is Compile.LAYERS),
    )


def complexity_of(candidate: Candidate) -> Complexity:
    """Return the complexity of a solved plan."""
    return complexity(candidate.arrangement, recomputes=recomputes(candidate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The least seconds of solved plans, by complexity."""

    tolerance: float
    seconds: Mapping[Complexity, float] = field(default_factory=dict)

    def with_one(self, of: Complexity, seconds: float) -> Known:
        """Return the record with one more solved plan."""
        least = min(seconds, self.seconds.get(of, float("inf")))
        return replace(self, seconds={**self.seconds, of: least})

    @property
    def fastest(self) -> float:
        """The least seconds of all."""
        return min(self.seconds.values(), default=float("inf"))

    def words(self, least_bound: float) -> str:
        """Return how fast the best plan is so far, and how much a faster one may gain."""
        if self.fastest == float("inf"):
            return "searching"
        left = max(0.0, 1 - least_bound / self.fastest)
        return f"searching: {seconds_text(self.fastest)} so far, at most {left:.1%} left to gain"

    def to_beat(self, of: Complexity) -> float:
        """Return the time that a plan must be below to be chosen.

        The plan must be within the tolerance of the fastest, and faster than every plan that is at
        least as simple.
        """
        as_simple = (seconds for known, seconds in self.seconds.items() if known <= of)
        return min(self.fastest * (1 + self.tolerance), *as_simple, float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simplicity(Generic[Item, Leaf]):
    """The functions that return the complexity of a leaf, and the least complexity below a node."""

    of_leaf: Callable[[Leaf], Complexity]
    below: Callable[[Item], Complexity]


def simplest_leaf(
    found: Iterable[FoundLeaf[Leaf]],
    waiting: Iterable[SearchNode[Item]],
    expand: Callable[[Item], Iterable[SearchNode[Item] | FoundLeaf[Leaf] | Unproved]],
    simplicity: Simplicity[Item, Leaf],
    *,
    within: float,
    is_late: Callable[[], bool] = lambda: False,
) -> FoundLeaf[Leaf]:
    """Return the simplest leaf with a value up to `within`; of equally simple ones, the least.

    Of nodes and leaves, the one with the best possible simplicity is taken first. So the first leaf
    taken is the answer, and nodes that cannot be simpler are never expanded. If time is up, the
    simplest leaf found is returned.
    """
    numbers = count()

    def entry(
        one: SearchNode[Item] | FoundLeaf[Leaf], floor: float
    ) -> Iterator[_Entry[Item, Leaf]]:
        value = one.value if isinstance(one, FoundLeaf) else max(one.bound, floor)
        if value > within:  # asked first, because a complexity may need solved layouts
            return
        of_leaf, below = simplicity.of_leaf, simplicity.below
        of = of_leaf(one.leaf) if isinstance(one, FoundLeaf) else below(one.item)
        yield of, value, one.rank, next(numbers), one

    firsts: tuple[SearchNode[Item] | FoundLeaf[Leaf], ...] = (*found, *waiting)
    queue = [one for first in firsts for one in entry(first, 0.0)]
    heapq.heapify(queue)
    while queue:
        _, bound, _, _, top = heapq.heappop(queue)
        if isinstance(top, FoundLeaf):
            return top
        if not is_late():
            children = (one for one in expand(top.item) if not isinstance(one, Unproved))
            for one in (pushed for child in children for pushed in entry(child, bound)):
                heapq.heappush(queue, one)
    raise AssertionError("the fastest is within any tolerance")


_Entry = tuple[Complexity, float, tuple[float, ...], int, SearchNode[Item] | FoundLeaf[Leaf]]
