"""A rank is in as many groups as its plan has memory for, and in none of the same ranks twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind
from autopar.planner.costs.steps.memory import context_bytes
from autopar.runtime.pipeline.schedules import KINDS
from autopar.runtime.ranks.mesh import start
from autopar.runtime.ranks.transport import Pairs, neighbour_groups
from tests.planner.costs.step_factories import ARRANGEMENT, SILENT
from tests.strict.alone import logs_alone
from tests.strict.log import Log

AXIS, PAIR = 1000, 1
COUNTED = replace(SILENT, communicator_bytes=AXIS, pair_bytes=PAIR)
PLANNED: Mapping[str, Mapping[str, Any]] = {
    "one axis": {"data": 4},
    "two axes": {"data": 2, "tensor": 2},
    "three axes": {"pipeline": 2, "data": 2, "tensor": 2},
    "copies": {"data": 4, "shard": 2},
    "copies and tensor": {"data": 4, "shard": 2, "tensor": 2},
    "1f1b": {"pipeline": 4},
    "gpipe": {"pipeline": 4, "schedule": ScheduleKind.GPIPE},
    "ring": {"pipeline": 4, "data": 2, "schedule": ScheduleKind.INTERLEAVED_1F1B},
    "odd ring": {"pipeline": 3, "tensor": 2, "schedule": ScheduleKind.INTERLEAVED_1F1B},
    "v": {"pipeline": 5, "schedule": ScheduleKind.ZERO_BUBBLE_V},
}


Ranks = tuple[int, ...]


def groups_of(arrangement: Arrangement) -> list[tuple[list[Ranks], list[Ranks]]]:
    """Return the groups of each rank, by their ranks in the world: of its axes, and its pairs."""
    found = []

    def noted(_: Log) -> None:
        own = arrangement
        mesh = start(pipeline=own.pipeline, data=own.data, tensor=own.tensor, shard=own.shard)
        axes = _groups_here()
        neighbour_groups(mesh, KINDS[own.schedule].pairs)
        found.append((axes, _groups_here()[len(axes) :]))

    logs_alone(noted, arrangement.ranks)
    return found


def _groups_here() -> list[Ranks]:
    world = dist.distributed_c10d._world
    return [tuple(world.pg_group_ranks[group]) for group in world.pg_names]


@pytest.mark.parametrize("kind", PLANNED)
def test_each_group_of_a_rank_is_there_once_and_has_its_memory(kind: str) -> None:
    pins = PLANNED[kind]
    arrangement = replace(ARRANGEMENT, **{"shard": pins.get("data", 1), **pins})
    found = groups_of(arrangement)
    for axes, pairs in found:
        assert len({*axes, *pairs}) == len(axes) + len(pairs)
        assert all(len(one) > 1 for one in axes)
        assert all(len(one) == 2 for one in pairs)
    held = max(AXIS * len(axes) + PAIR * len(pairs) for axes, pairs in found)
    assert context_bytes(arrangement, COUNTED) == held


@pytest.mark.parametrize("kind", ScheduleKind)
def test_scripts_and_plans_agree_on_which_schedules_have_pairs(kind: ScheduleKind) -> None:
    assert SCHEDULES[kind].has_pairs is (KINDS[kind].pairs is not Pairs.NONE)
