"""Turns an arrangement into what the stage program is asked: layers, their modes, the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planner.cluster.device import Device
from autopar.planner.costs.prediction import Arrangement, Modes, Recompute, Zero
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import context_bytes
from autopar.planner.costs.steps.rank_groups import rank_groups
from autopar.planner.plan.solving.costing import Costing, Inside
from autopar.planner.programs.stages.question import Pin, StageQuestion

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
        has_buckets = arrangement.data > 1 and arrangement.zero < Zero.GRADIENTS
        sizes = self.demands.bucket_bytes
        return StageQuestion(
            arrangement=arrangement,
            groups=rank_groups(self.costing.cluster, arrangement),
            constants=self.constants,
            rows=self.rows(arrangement, solution),
            allowed=self.demands.modes,
            is_cuttable=self.demands.is_cuttable,
            pins=self.demands.pins,
            limit_bytes=self.limit_bytes(arrangement),
            tied_gradient_bytes=self.costing.tied_gradient_bytes(inside_of(arrangement, solution)),
            bucket_bytes=sizes if has_buckets else sizes[:1],
        )

    def most_bytes(self, arrangement: Arrangement) -> int:
        """Return what any rank may hold beside what libraries take, a little more than allowed."""
        most = max(self.demands.limit_bytes.values())
        return most - context_bytes(arrangement, self.constants) + CLOSE_BYTES

    def rows(self, arrangement: Arrangement, solution: int) -> tuple[tuple[Modes, ...], ...]:
        """Return what the layers cost on each rank of the pipeline."""
        inside = inside_of(arrangement, solution)
        return tuple(self.costing.rows(inside, one) for one in self.devices(arrangement))

    def limit_bytes(self, arrangement: Arrangement) -> tuple[int, ...]:
        """Return what each rank of the pipeline may use."""
        return tuple(self.demands.limit_bytes[one.name] for one in self.devices(arrangement))

    def devices(self, arrangement: Arrangement) -> tuple[Device, ...]:
        """Return the device of each pipeline rank: the first of its ranks, as the prediction."""
        devices = self.costing.cluster.devices
        width = arrangement.tensor * arrangement.data
        return tuple(devices[rank * width] for rank in range(arrangement.pipeline))


def inside_of(arrangement: Arrangement, solution: int) -> Inside:
    """Return what the inside of the layers depends on."""
    return Inside(
        tensor=arrangement.tensor,
        microbatch=arrangement.microbatch,
        solution=solution,
        is_one_stage=arrangement.pipeline == 1,
    )
