"""Keeps the layouts and prices that searches find for a model's layers, for later searches.

Layouts and prices are found by a `LayoutKey`, least times over all layouts by a `LeastKey`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.shape import GroupShape, RowShare
from autopar.planner.costs.ops.kept import SharedFindings
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import Modes
from autopar.planner.layers import Compile
from autopar.planner.plan.declared.constraints import HostSaving
from autopar.planner.programs.layouts.choice import LayoutProgram, LayoutSolution, LinePrice
from autopar.planner.programs.layouts.rules import LayoutRules
from autopar.planner.programs.layouts.strategies import Ways


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKey:
    """Everything that layouts and costs inside layers depend on, besides the devices."""

    tensor: int
    microbatch: int
    compile: Compile
    solution: int  # index in the Pareto front of layouts
    is_one_stage: bool  # then layers that share a parameter are on one rank, which stores it once
    # if given: of the layouts about as good as the solution, those with the fewest printed lines
    lines: LinePrice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKey:
    """Everything that layouts depend on, besides the model; equal machines share their layouts."""

    tensor: int
    microbatch: int
    compile: Compile
    shape: GroupShape
    device: Device
    rules: LayoutRules
    host_saving: HostSaving


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastKey:
    """Everything that least times depend on, besides the model, tensor ranks and rows."""

    device: Device
    compile: Compile
    rules: LayoutRules


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLayer:
    """The least times of a layer over all layouts, for one microbatch.

    `alone_seconds` is the forward without waiting for the host.
    """

    alone_seconds: float
    forward_seconds: float
    backward_seconds: float
    input_gradient_seconds: float


LeastTimes = dict[tuple[int, int], tuple[LeastLayer, ...]]  # of classes, by tensor degree and rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLeast:
    """The least times of one `LeastKey`, as they are stored on disk."""

    times: tuple[tuple[tuple[int, int], tuple[LeastLayer, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRows:
    """The costs of all layers inside some layouts: equal layers share one of `costs`."""

    inside: LayerKey
    share: RowShare
    costs: tuple[Modes, ...]
    numbers: tuple[int, ...]  # each layer's index in `costs`


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrices:
    """The layouts and prices of one `LayoutKey`, as they are stored on disk."""

    fastest: LayoutSolution | None
    front: tuple[LayoutSolution, ...] | None
    simpler: tuple[tuple[LayerKey, LayoutSolution], ...]
    rows: tuple[PricedRows, ...]


@dataclass(slots=True, kw_only=True)
class LayoutPrices:
    """The layouts and prices of one `LayoutKey` so far."""

    fastest: LayoutSolution | None = None
    front: tuple[LayoutSolution, ...] | None = None
    simpler: dict[LayerKey, LayoutSolution] = field(default_factory=dict)
    rows: dict[tuple[LayerKey, RowShare], tuple[Modes, ...]] = field(default_factory=dict)
    program: LayoutProgram | None = None

    @classmethod
    def of(cls, known: StoredPrices) -> LayoutPrices:
        """Return the prices that were stored."""
        rows = {
            (one.inside, one.share): tuple(one.costs[number] for number in one.numbers)
            for one in known.rows
        }
        simpler = dict(known.simpler)
        return cls(
            fastest=known.fastest,
            front=known.front,
            simpler=simpler,
            rows=rows,
        )

    def stored(self) -> StoredPrices:
        """Return the prices in the form for the disk."""
        return StoredPrices(
            fastest=self.fastest,
            front=self.front,
            simpler=tuple(self.simpler.items()),
            rows=tuple(_numbered(*key, row) for key, row in self.rows.items()),
        )

    def add(self, found: StoredPrices) -> None:
        """Add prices that another process found; what is known stays."""
        self.fastest = self.fastest or found.fastest
        self.front = self.front or found.front
        other = LayoutPrices.of(found)
        self.simpler = other.simpler | self.simpler
        self.rows = other.rows | self.rows

    @property
    def size(self) -> int:
        """The number of layouts and rows, which only grows."""
        once = sum(one is not None for one in (self.fastest, self.front))
        return once + len(self.simpler) + len(self.rows)

    @property
    def is_proved(self) -> bool:
        """Whether no limit ended a layout program."""
        first = (self.fastest,) if self.fastest is not None else ()
        return all(one.is_proved for one in (*first, *(self.front or ()), *self.simpler.values()))


def _numbered(inside: LayerKey, share: RowShare, row: tuple[Modes, ...]) -> PricedRows:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(map(id, row)))}
    costs = {id(one): one for one in row}
    return PricedRows(
        inside=inside,
        share=share,
        costs=tuple(costs[key] for key in numbers),
        numbers=tuple(numbers[id(one)] for one in row),
    )


Sizes = Mapping[LayoutKey | LeastKey, int]


def _nothing(_kind: type[Any], _key: object) -> None:
    """Recall nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The layouts and prices found for a model so far, shared with searches on other machines.

    `recall` returns the `StoredPrices` or `StoredLeast` of a key, if an earlier process has stored
    them on disk.
    """

    recall: Callable[[type[Any], LayoutKey | LeastKey], Any] = _nothing
    pricers: dict[tuple[RowShare, Compile], OpPricer] = field(default_factory=dict)
    alike: SharedFindings = field(default_factory=SharedFindings)
    ways: dict[str, Ways] = field(default_factory=dict)  # of each op
    by_key: dict[LayoutKey, LayoutPrices] = field(default_factory=dict)
    _least: dict[LeastKey, LeastTimes] = field(default_factory=dict)
    # the sizes of what was recalled, before this process adds more
    _recalled: dict[LayoutKey | LeastKey, int] = field(default_factory=dict)

    def at(self, key: LayoutKey) -> LayoutPrices:
        """Return the prices of a key; the caller adds more to them."""
        if key not in self.by_key:
            known: StoredPrices | None = self.recall(StoredPrices, key)
            found = LayoutPrices() if known is None else LayoutPrices.of(known)
            self.by_key[key], self._recalled[key] = found, found.size
        return self.by_key[key]

    def least(self, key: LeastKey) -> LeastTimes:
        """Return the least times of a key; the caller adds more to them."""
        if key not in self._least:
            known: StoredLeast | None = self.recall(StoredLeast, key)
            self._least[key] = {} if known is None else dict(known.times)
            self._recalled[key] = len(self._least[key])
        return self._least[key]

    def grown(self) -> Iterator[tuple[LayoutKey | LeastKey, StoredPrices | StoredLeast]]:
        """Yield the keys that got more than was recalled; without layouts that are not proved."""
        for key, found in self.since(self._recalled):
            if isinstance(key, LeastKey) or self.by_key[key].is_proved:
                yield key, found

    def sizes(self) -> Sizes:
        """Return how much is known of each key."""
        known = ((key, one.size) for key, one in self.by_key.items())
        return {**dict(known), **{key: len(times) for key, times in self._least.items()}}

    def since(
        self, sizes: Sizes
    ) -> Iterator[tuple[LayoutKey | LeastKey, StoredPrices | StoredLeast]]:
        """Yield the keys that have more than in `sizes`, with all that is known of them."""
        for key, one in self.by_key.items():
            if one.size > sizes.get(key, 0):
                yield key, one.stored()
        for least, times in self._least.items():
            if len(times) > sizes.get(least, 0):
                yield least, StoredLeast(times=tuple(times.items()))

    @property
    def have_grown(self) -> bool:
        """Whether this process found more than was recalled."""
        return any(one.size > self._recalled[key] for key, one in self.by_key.items())

    def add(self, key: LayoutKey | LeastKey, found: StoredPrices | StoredLeast) -> None:
        """Add what another process found."""
        if isinstance(key, LayoutKey) and isinstance(found, StoredPrices):
            self.at(key).add(found)
        elif isinstance(key, LeastKey) and isinstance(found, StoredLeast):
            known = self.least(key)
            known.update((place, one) for place, one in found.times if place not in known)
