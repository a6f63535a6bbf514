"""Turns an arrangement into what the stage program is asked: layers, their options, and limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from autopar.planner.cluster.blocks import Kind, Share, different_kinds, kinds_of_blocks, shares_of
from autopar.planner.costs.collectives.norm_statistics import synchronising
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.costs.schedules.pipeline import rank_of
from autopar.planner.costs.schedules.table import (
    PipelineShape,
    ScheduleKind,
    deferred_microbatches,
    in_flight_microbatches,
)
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import (
    context_bytes,
    layer_state_bytes,
    layer_unsharded_bytes,
)
from autopar.planner.costs.steps.rank_groups import rank_groups
from autopar.planner.costs.steps.step import pipeline_shape
from autopar.planner.plan.solving.costing import Costing, Inside, Modes
from autopar.planner.programs.stages.problem import (
    Cut,
    LayerChoices,
    LayerOption,
    LayerRun,
    Pin,
    StageLimit,
    StageLimits,
)

Item = TypeVar("Item")
Rows = tuple[tuple[Modes, ...], ...]  # of each pipeline rank, one object for equal ranks
CLOSE_BYTES = 2**20  # short of which the prediction is asked too: the program rounds up


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
    _known: dict[object, LayerChoices] = field(init=False, default_factory=dict, compare=False)

    def asked(self, arrangement: Arrangement, solution: int) -> tuple[LayerChoices, StageLimits]:
        """Return what the stage program is asked but for the cuts, with the most memory it gets."""
        rows = self.rows(arrangement, solution)
        memory = [max(0, size) for size in self.room_bytes(arrangement)]
        choices = self._uncut_choices(arrangement, solution, rows)
        return choices, self.limits(arrangement, rows, memory)

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
        """Return the different groups of devices, with their rows, that pipeline ranks have."""
        cluster, rows = self.costing.cluster_of(arrangement), arrangement.microbatch
        if arrangement.rows:  # of data ranks alone
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

    def choices(self, arrangement: Arrangement, solution: int, rows: Rows) -> LayerChoices:
        """Return the layers with their options, and what a cut between them costs."""
        uncut = self._uncut_choices(arrangement, solution, rows)
        cuts = self._cuts(arrangement, rows[0])
        return replace(uncut, cuts=cuts) if cuts else uncut

    def _uncut_choices(self, arrangement: Arrangement, solution: int, rows: Rows) -> LayerChoices:
        """Return the layers' options, the same for all arrangements that divide the state alike."""
        division = arrangement.zero, arrangement.shard if arrangement.zero else 1
        has_norms = any(modes[Recompute.NONE].statistics.norms for modes in rows[0])
        data = arrangement.data if has_norms else 1
        key = (
            inside_of(arrangement, solution),
            division,
            data,
            self.kinds(arrangement),
            arrangement.order,
        )
        if key not in self._known:
            self._known[key] = self._made_choices(arrangement, different(rows))
        return self._known[key]

    def _made_choices(self, arrangement: Arrangement, rows: Rows) -> LayerChoices:
        """Return the options of layers on each different kind of pipeline rank."""
        first = rows[0]
        allowed = self.demands.modes
        keys = [(id(modes), allowed[place]) for place, modes in enumerate(first)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        places = [keys.index(key) for key in numbers]
        return LayerChoices(
            options=tuple(
                tuple(
                    tuple(self._options(arrangement, own[place], self.demands.modes[place]))
                    for place in places
                )
                for own in rows
            ),
            runs=tuple(
                LayerRun(layer_class=numbers[key], count=len(list(group)))
                for key, group in groupby(keys)
            ),
            pins=self.demands.pins,
        )

    def _options(
        self, arrangement: Arrangement, modes: Modes, allowed: frozenset[Recompute]
    ) -> Iterator[LayerOption]:
        """Yield one option for each recompute mode, without those that equal a simpler one."""
        margin = 1.0 + self.constants.margin
        unsharded = layer_unsharded_bytes(modes[Recompute.NONE], arrangement)
        group = rank_groups(self.costing.cluster_of(arrangement), arrangement).data
        seen: set[tuple[float, int, int]] = set()
        for mode in Recompute:
            cost = modes[mode]
            amounts = (cost.backward_seconds, cost.saved_bytes, cost.transient_bytes)
            if mode not in allowed or amounts in seen:
                continue
            seen.add(amounts)
            wait = synchronising(cost.statistics, group)
            deferred = 0 if cost.recompute_seconds else cost.deferred_bytes  # is it split at all?
            yield LayerOption(
                name=mode.value,
                seconds=cost.forward_seconds
                + cost.backward_seconds
                + wait.forward_seconds
                + wait.backward_seconds,
                fixed_bytes=int(layer_state_bytes(cost, arrangement) * margin) + 1,
                saved_bytes=int(cost.saved_bytes * margin) + 1,
                deferred_bytes=int(deferred * margin) + 1,
                transient_bytes=int((cost.transient_bytes + unsharded) * margin) + 1,
            )

    def _cuts(self, arrangement: Arrangement, row: Sequence[Modes]) -> tuple[Cut, ...]:
        if arrangement.pipeline == 1:
            return ()
        groups = rank_groups(self.costing.cluster_of(arrangement), arrangement)
        known: dict[int, float] = {}
        cuts = []
        for modes, is_allowed in zip(row[:-1], self.demands.is_cuttable, strict=False):
            size = modes[Recompute.NONE].output_bytes
            seconds = known.setdefault(size, groups.transfer_seconds(size))
            cuts.append(
                Cut(beginning_seconds=seconds, ending_seconds=seconds, is_allowed=is_allowed)
            )
        return tuple(cuts)

    def limits(
        self,
        arrangement: Arrangement,
        rows: Rows,
        memory: Sequence[int],
    ) -> StageLimits:
        """Return what each stage may use: so much memory on each pipeline rank."""
        classes = {id(row): number for number, row in enumerate(different(rows))}
        shape = pipeline_shape(arrangement)
        stages = []
        for stage, (in_flight, deferred) in enumerate(_held_by_stage(arrangement.schedule, shape)):
            rank = rank_of(arrangement.schedule, stage, arrangement.pipeline)
            stages.append(
                StageLimit(
                    memory_bytes=memory[rank],
                    in_flight=in_flight,
                    deferred=deferred,
                    device_class=classes[id(rows[rank])],
                )
            )
        return StageLimits(
            stages=tuple(stages),
            microbatches=arrangement.microbatches,
            stages_per_rank=arrangement.stages_per_rank,
            is_v_shaped=arrangement.schedule is ScheduleKind.ZERO_BUBBLE_V,
        )


@lru_cache(maxsize=1024)
def _held_by_stage(schedule: ScheduleKind, shape: PipelineShape) -> tuple[tuple[int, int], ...]:
    """Return the microbatches in flight of each stage, and how many of them are deferred."""
    if shape.ranks == 1:
        return ((1, 0),) * shape.stages
    return tuple(
        (
            in_flight_microbatches(schedule, stage, shape),
            deferred_microbatches(schedule, stage, shape),
        )
        for stage in range(shape.stages)
    )


def different(rows: Rows) -> Rows:
    """Return the rows of layers that differ, in the order of their first pipeline rank."""
    return tuple({id(row): row for row in rows}.values())


def inside_of(arrangement: Arrangement, solution: int) -> Inside:
    """Return what the inside of the layers depends on."""
    return Inside(
        tensor=arrangement.tensor,
        microbatch=arrangement.microbatch,
        solution=solution,
        is_one_stage=arrangement.pipeline == 1,
    )
