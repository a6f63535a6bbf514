"""Turns an arrangement into what the stage program is asked: layers, their modes, the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.planner.cluster.blocks import Kind, Share, different_kinds, kinds_of_blocks, shares_of
from autopar.planner.costs.prediction import Arrangement, Modes, Recompute
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import context_bytes
from autopar.planner.costs.steps.rank_groups import rank_groups
from autopar.planner.plan.solving.costing import Costing, Inside
from autopar.planner.programs.stages.question import Pin, StageQuestion

Item = TypeVar("Item")
Rows = tuple[tuple[Modes, ...], ...]  # of each pipeline rank, one object for equal ranks
CLOSE_BYTES = 2**20  # more than what a bound may round


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What every candidate has to respect, beside its arrangement."""

    limit_bytes: Mapping[str, int]  # of each device by name
    modes: tuple[frozenset[Recompute], ...]  # that each layer may use
    pins: tuple[Pin, ...]
    is_cuttable: tuple[bool, ...]  # whether a stage may end with each layer
    may_waste_ranks: bool  # of the tensor axis, on computing the same: its degree is pinned
    bucket_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What the stage program is asked about arrangements of one model on one cluster."""

    costing: Costing
    demands: Demands
    constants: FrameworkConstants

    def asked(self, arrangement: Arrangement, solution: int) -> StageQuestion:
        """Return the question of an arrangement in one of the layouts."""
        sizes = self.demands.bucket_bytes
        return StageQuestion(
            arrangement=arrangement,
            groups=rank_groups(self.costing.cluster_of(arrangement), arrangement),
            constants=self.constants,
            rows=self.rows(arrangement, solution),
            allowed=self.demands.modes,
            is_cuttable=self.demands.is_cuttable,
            pins=self.demands.pins,
            limit_bytes=self.limit_bytes(arrangement),
            tied_gradient_bytes=self.costing.tied_gradient_bytes(inside_of(arrangement, solution)),
            bucket_bytes=sizes if arrangement.has_buckets else sizes[:1],
        )

    def most_bytes(self, arrangement: Arrangement) -> int:
        """Return what any rank may hold beside what libraries take, a little more than allowed."""
        return max(self.room_bytes(arrangement))

    def room_bytes(self, arrangement: Arrangement) -> tuple[int, ...]:
        """Return what each pipeline rank may hold likewise."""
        more = CLOSE_BYTES - context_bytes(arrangement, self.constants)
        return tuple(limit + more for limit in self.limit_bytes(arrangement))

    def limit_bytes(self, arrangement: Arrangement) -> tuple[int, ...]:
        """Return what each pipeline rank may use: the least that any of its devices allows."""
        limits = self.demands.limit_bytes
        kinds = self.kinds(arrangement)
        least = [min(limits[share.device.name] for share in own) for own in kinds]
        return self._each(arrangement, least)

    def rows(self, arrangement: Arrangement, solution: int) -> Rows:
        """Return what the layers cost each pipeline rank, which waits for its slowest device."""
        inside = inside_of(arrangement, solution)
        kinds = self.kinds(arrangement)
        return self._each(arrangement, [self.costing.slowest_rows(inside, own) for own in kinds])

    def kinds(self, arrangement: Arrangement) -> tuple[Kind, ...]:
        """Return the different groups of devices, with their rows, that pipeline ranks have.

        Data ranks with unlike numbers of rows wait for those with most, but on unlike devices.
        """
        cluster, rows = self.costing.cluster_of(arrangement), arrangement.microbatch
        if arrangement.rows and arrangement.data == arrangement.ranks:
            return (shares_of(cluster.devices, arrangement.rows),)
        kinds = different_kinds(cluster, arrangement.pipeline)
        return tuple(tuple(Share(device, rows) for device in own) for own in kinds)

    def _each(self, arrangement: Arrangement, values: Sequence[Item]) -> tuple[Item, ...]:
        """Return for each pipeline rank what is known of its kind."""
        if len(values) == 1:
            return (values[0],) * arrangement.pipeline
        degrees = self.costing.cluster_of(arrangement), arrangement.pipeline
        known = dict(zip(different_kinds(*degrees), values, strict=True))
        return tuple(known[own] for own in kinds_of_blocks(*degrees))


def inside_of(arrangement: Arrangement, solution: int) -> Inside:
    """Return what the inside of the layers depends on."""
    return Inside(
        tensor=arrangement.tensor,
        microbatch=arrangement.microbatch,
        solution=solution,
        is_one_stage=arrangement.pipeline == 1,
    )
