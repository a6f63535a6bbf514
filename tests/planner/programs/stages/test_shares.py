"""The memory of a rank is divided among its stages so that all of it is used, and no more."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.programs.stages.choice import StagePlan, choose_stages
from autopar.planner.programs.stages.problem import (
    LayerChoices,
    LayerOption,
    LayerRun,
    StageLimit,
    StageLimits,
)
from autopar.planner.programs.stages.shares import lightest_bytes, shares_of, stages_by_rank
from tests.planner.programs.stages.stage_cases import Case, cases

KEPT = LayerOption(name="none", seconds=3.0, saved_bytes=10, transient_bytes=1)
AGAIN = LayerOption(name="full", seconds=4.0, saved_bytes=1, transient_bytes=10)


def in_a_v(memory: int, *, ranks: int = 4) -> StageLimits:
    """Two stages per rank, down and up again: as many in flight on each rank in all."""
    in_flight = range(2 * ranks, 0, -1)
    return StageLimits(
        stages=tuple(StageLimit(memory_bytes=memory, in_flight=one) for one in in_flight),
        microbatches=2 * ranks,
        stages_per_rank=2,
        is_v_shaped=True,
    )


def equal_layers(count: int) -> LayerChoices:
    runs = (LayerRun(layer_class=0, count=count),)
    return LayerChoices(options=(((KEPT, AGAIN),),), runs=runs)


def with_memory(limits: StageLimits, more: int) -> StageLimits:
    stages = (replace(one, memory_bytes=one.memory_bytes + more) for one in limits.stages)
    return replace(limits, stages=tuple(stages))


@given(cases())
def test_shares_and_one_reserve_are_the_memory_of_the_rank_at_most(case: Case) -> None:
    choices, limits = case
    shares = shares_of(choices, limits)
    for numbers in stages_by_rank(limits):
        reserved = shares[numbers[0]].reserved_bytes or 0
        stays = sum(shares[p].memory_bytes - reserved for p in numbers)
        assert stays + reserved <= limits.stages[numbers[0]].memory_bytes


@given(cases(), st.integers(1, 60))
def test_more_memory_makes_no_share_smaller(case: Case, more: int) -> None:
    choices, limits = case
    few, many = shares_of(choices, limits), shares_of(choices, with_memory(limits, more))
    for one, other in zip(few, many, strict=True):
        assert one.memory_bytes <= other.memory_bytes
        assert one.reserved_bytes == other.reserved_bytes


@pytest.mark.parametrize(("memory", "again"), [(300, []), (110, [0, 1, 2, 3])])
def test_one_round_computes_again_before_the_other_does(memory: int, again: list[int]) -> None:
    """Nine microbatches are in flight on each rank, in two stages of two layers: 180 bytes."""
    answer = choose_stages(equal_layers(16), in_a_v(memory))
    assert isinstance(answer, StagePlan)
    assert [p for p, stage in enumerate(answer.stages) if "full" in stage.options] == again


def test_an_even_split_fits_from_the_bytes_on_that_are_told() -> None:
    choices = equal_layers(16)
    least = lightest_bytes(choices, in_a_v(0))
    assert isinstance(choose_stages(choices, in_a_v(least)), StagePlan)
    assert not isinstance(choose_stages(choices, in_a_v(least - 1)), StagePlan)
