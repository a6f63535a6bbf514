"""The nodes of the search: a point, then its variants in families, the simplest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.plan.search.simpler import complexity


@dataclass(frozen=True, slots=True)
class Point:
    """Degrees and microbatch, the variants still open."""

    arrangement: Arrangement


class Pressure(IntEnum):
    """What the bound of a variant knows of memory, each one sharper and slower than the last."""

    NONE = 0  # as if it were endless
    OF_ANY = 1  # what any layouts need at least
    OF_LAYOUTS = 2  # what those need that there are


@dataclass(frozen=True, slots=True)
class Variant:
    """A whole arrangement, the stages still open; `thriftier` ones can only be better in memory."""

    arrangement: Arrangement
    thriftier: tuple[Arrangement, ...] = ()
    pressure: Pressure = Pressure.NONE

    @property
    def family(self) -> tuple[Arrangement, ...]:
        """All of them."""
        return (self.arrangement, *self.thriftier)


Item = Point | Variant


def families(variants_: Iterable[Arrangement]) -> list[list[Arrangement]]:
    """Return each variant alone, but ZeRO-2 and 3 behind the ZeRO-1 that they only save memory on.

    They communicate more than ZeRO-1 and update as fast, so where that fits as it is, they cannot
    be better.
    """
    heads: dict[tuple[object, ...], list[Arrangement]] = {}
    families = []
    for one in variants_:
        pipeline = one.schedule, one.stages_per_rank, one.compressed_gradients
        head = heads.get(pipeline)
        if one.zero >= Zero.GRADIENTS and head is not None:
            head.append(one)
            continue
        family = [one]
        if one.zero is Zero.OPTIMIZER:
            heads[pipeline] = family
        families.append(family)
    return families


def simplicity(arrangement: Arrangement) -> tuple[float, ...]:
    """Return what orders equals: the simpler one, and of equally simple ones fewer parts."""
    return (
        *complexity(arrangement, recomputes=False),
        arrangement.pipeline,
        arrangement.tensor,
        arrangement.data,
        arrangement.stages_per_rank,
        arrangement.microbatches,
        len(set(arrangement.rows)),
        arrangement.data // arrangement.shard,
        list(ScheduleKind).index(arrangement.schedule),
    )
