"""Layouts and prices of a model's layers at each place (`Place`), kept for later searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.shape import GroupShape, RowShare
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import Compile, Modes
from autopar.planner.plan.declared.constraints import HostSaving
from autopar.planner.programs.layouts.choice import LayoutProgram, LayoutSolution, LinePrice
from autopar.planner.programs.layouts.rules import LayoutRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """Everything that layouts and costs inside layers depend on, besides the devices."""

    tensor: int
    microbatch: int
    compile: Compile
    solution: int  # index in the Pareto front of layouts
    is_one_stage: bool  # so that tied parameters are held once
    # if given: of the layouts about as good as the solution, those with the fewest printed lines
    lines: LinePrice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Everything that layouts depend on, besides the model; equal machines share their layouts."""

    tensor: int
    microbatch: int
    compile: Compile
    shape: GroupShape
    device: Device
    rules: LayoutRules
    host_saving: HostSaving


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRows:
    """The costs of all layers inside some layouts: equal layers share one of `costs`."""

    inside: Inside
    share: RowShare
    costs: tuple[Modes, ...]
    numbers: tuple[int, ...]  # each layer's index in `costs`


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlace:
    """Layouts and prices at one place, as they can be kept on disk."""

    fastest: LayoutSolution | None
    front: tuple[LayoutSolution, ...] | None
    simpler: tuple[tuple[Inside, LayoutSolution], ...]
    rows: tuple[PricedRows, ...]


@dataclass(slots=True, kw_only=True)
class PlacePrices:
    """Layouts and prices at one place so far."""

    fastest: LayoutSolution | None = None
    front: tuple[LayoutSolution, ...] | None = None
    simpler: dict[Inside, LayoutSolution] = field(default_factory=dict)
    rows: dict[tuple[Inside, RowShare], tuple[Modes, ...]] = field(default_factory=dict)
    program: LayoutProgram | None = None

    @classmethod
    def of(cls, known: PricedPlace) -> PlacePrices:
        """Return prices that were kept."""
        rows = {
            (one.inside, one.share): tuple(one.costs[number] for number in one.numbers)
            for one in known.rows
        }
        simpler = dict(known.simpler)
        return cls(fastest=known.fastest, front=known.front, simpler=simpler, rows=rows)

    def kept(self) -> PricedPlace:
        """Return the prices in the form for the disk."""
        return PricedPlace(
            fastest=self.fastest,
            front=self.front,
            simpler=tuple(self.simpler.items()),
            rows=tuple(_numbered(*key, row) for key, row in self.rows.items()),
        )

    @property
    def size(self) -> int:
        """The number of layouts and rows, which only grows."""
        ends = (self.fastest is not None) + (self.front is not None)
        return ends + len(self.simpler) + len(self.rows)

    @property
    def is_proved(self) -> bool:
        """Whether no limit ended a layout program."""
        first = (self.fastest,) if self.fastest is not None else ()
        return all(one.is_proved for one in (*first, *(self.front or ()), *self.simpler.values()))


def _numbered(inside: Inside, share: RowShare, row: tuple[Modes, ...]) -> PricedRows:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(map(id, row)))}
    costs = {id(one): one for one in row}
    return PricedRows(
        inside=inside,
        share=share,
        costs=tuple(costs[key] for key in numbers),
        numbers=tuple(numbers[id(one)] for one in row),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices and layouts of a model so far, shared with searches on other machines.

    `recall` returns the prices of a place that an earlier process has kept on disk.
    """

    recall: Callable[[Place], PricedPlace | None] = lambda _: None
    pricers: dict[tuple[RowShare, Compile], OpPricer] = field(default_factory=dict)
    places: dict[Place, PlacePrices] = field(default_factory=dict)
    _recalled: dict[Place, int] = field(default_factory=dict)  # the sizes when they were recalled

    def at(self, place: Place) -> PlacePrices:
        """Return the prices at a place, to which more are added."""
        if place not in self.places:
            known = self.recall(place)
            found = PlacePrices() if known is None else PlacePrices.of(known)
            self.places[place], self._recalled[place] = found, found.size
        return self.places[place]

    def grown(self) -> Iterator[tuple[Place, PricedPlace]]:
        """Yield the places with new prices (not recalled ones), if all their layouts are proved."""
        for place, one in self.places.items():
            if one.size > self._recalled[place] and one.is_proved:
                yield place, one.kept()
