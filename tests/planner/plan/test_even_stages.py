"""Stages of one rank become as even as what is accepted allows."""

from __future__ import annotations

from autopar.planner.costs.prediction import Recompute
from autopar.planner.plan.plan import PlannedStage, Stages, even_stages

MODES = (*(Recompute.FULL,) * 9, *(Recompute.NONE,) * 23)


def stages(counts: tuple[int, ...], ranks: tuple[int, ...] = (0, 1, 1, 0)) -> Stages:
    found, first = [], 0
    for rank, count in zip(ranks, counts, strict=True):
        modes = MODES[first : first + count]
        found.append(PlannedStage(rank=rank, first=first, count=count, recompute=modes))
        first += count
    return tuple(found)


def test_stages_of_one_rank_share_its_layers_and_each_layer_keeps_its_mode() -> None:
    assert even_stages(stages((5, 4, 13, 10)), lambda _: True) == stages((7, 8, 9, 8))


def test_a_rank_keeps_its_number_of_layers() -> None:
    uneven = stages((20, 12), ranks=(0, 1))
    assert even_stages(uneven, lambda _: True) == uneven


def test_what_is_refused_is_not_done() -> None:
    found = even_stages(stages((5, 4, 13, 10)), lambda one: one[0].count == 5)
    assert found == stages((5, 8, 9, 10))
