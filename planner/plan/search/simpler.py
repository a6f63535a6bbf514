"""Orders arrangements by simplicity, and finds the simplest plan near the fastest one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.costs.prediction import Arrangement, Offload
from autopar.planner.layers import Compile
from autopar.planner.plan.search.best_first import FoundLeaf, SearchNode, Unproved, never
from autopar.planner.plan.solving.candidate import Candidate, recomputes
from autopar.planner.precision import Compression

Item = TypeVar("Item")
Leaf = TypeVar("Leaf")
Complexity = tuple[int, ...]  # less is simpler


def complexity(arrangement: Arrangement, *, recomputes: bool) -> Complexity:
    """Return how hard a plan is to read and to trust, most important first.

    In this order: how many replicas take local steps, which change what is learnt; how many kinds
    of parallelism there are; how many of them need printed forwards (pipeline and tensor: data
    ranks run the model's own forward); the ZeRO level; whether the host has an optimizer; how
    gradients are compressed; whether a layer is recomputed; whether layers are compiled.
    """
    opening = (arrangement.pipeline > 1) + (arrangement.tensor > 1)
    return (
        arrangement.data // arrangement.averaging_ranks - 1,
        opening + (arrangement.data > 1),
        opening,
        arrangement.zero.value,
        int(arrangement.offload is not Offload.NONE),
        [*Compression].index(arrangement.compression),
        int(recomputes),
        [*Compile].index(arrangement.compile),
    )


def complexity_of(candidate: Candidate) -> Complexity:
    """Return the complexity of a solved plan."""
    return complexity(candidate.arrangement, recomputes=recomputes(candidate))


@dataclass(frozen=True, slots=True, kw_only=True)
class BestByComplexity:
    """The least seconds of solved plans, by complexity."""

    tolerance: float
    seconds: Mapping[Complexity, float] = field(default_factory=dict)

    def with_one(self, of: Complexity, seconds: float) -> BestByComplexity:
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
    """Return the simplest leaf with a value up to `within`; of equally simple ones, the least.

    `below` returns the least complexity below a node. Of nodes and leaves, the one with the best
    possible simplicity is taken first. So the first leaf taken is the answer, and nodes that cannot
    be simpler are never expanded. If time is up, the simplest leaf found is returned.
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
