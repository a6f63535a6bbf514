"""Tests that the stages chosen are the best there are: against the price of every cut and mix."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, count, pairwise
from statistics import median

import pytest

from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.programs.stages.choice import (
    EXACT,
    QUICK,
    THOROUGH,
    Effort,
    StageAnswer,
)
from autopar.planner.programs.stages.modes import PricedCut
from autopar.planner.programs.stages.question import Cut, even_cut, least_seconds
from autopar.planner.programs.stages.smallest import smallest_stages
from tests.cells import cells
from tests.planner.programs.stages.stage_cases import (
    Price,
    StageCase,
    Truth,
    best_within,
    brute_force,
    choose_stages,
    on_host,
    prices,
    random_case,
    uneven_case,
    whole_case,
)

ROUNDING = 1 + 1e-9
ROOMS = (2.0, 0.9, 0.7, 0.5)  # memory that does not press, presses, suffices for few or for none
PIPELINES = tuple(
    (kind, room, seed)
    for kind in ScheduleKind
    for room in ROOMS
    for seed in ((1, 2) if room != 2.0 else (3,))
)
WHOLE = tuple((zero, room, seed) for zero in Zero for room in (0.9, 0.6) for seed in (1, 2))
RANDOM = range(500)
FEW = range(20)
EACH = (0, 1, 4, 8, 9)  # each schedule and each room of random_several
SEVERAL = (
    ScheduleKind.INTERLEAVED_1F1B,
    ScheduleKind.INTERLEAVED_ZERO_BUBBLE,
    ScheduleKind.ZERO_BUBBLE_V,
)
IN_WHOLE_NUMBERS = replace(EXACT, most_columns=0)  # as for models too large for all intervals


@cache
def pipeline_case(kind: ScheduleKind, room: float, seed: int) -> StageCase:
    return random_case(seed, kind=kind, most_layers=5, room=room)


@cache
def prices_of(kind: ScheduleKind, seed: int) -> list[Price]:
    return list(prices(pipeline_case(kind, 1.0, seed)))  # which are the same in any room


def truth_of(kind: ScheduleKind, room: float, seed: int) -> Truth:
    return best_within(pipeline_case(kind, room, seed), prices_of(kind, seed))


def found_seconds(answer: StageAnswer) -> float:
    return answer.best.seconds if answer.best else math.inf


@pytest.mark.parametrize(
    ("kind", "room", "seed"), cells(PIPELINES, [one for one in PIPELINES if one[2] != 2])
)
def test_a_pipeline_is_the_best_of_all_cuts_and_modes(
    kind: ScheduleKind, room: float, seed: int
) -> None:
    truth = truth_of(kind, room, seed).seconds
    answer = choose_stages(pipeline_case(kind, room, seed).question, effort=EXACT)
    assert found_seconds(answer) == pytest.approx(truth, rel=1e-9)
    assert truth / ROUNDING <= answer.bound_seconds * (1 + EXACT.gap)
    assert answer.bound_seconds <= truth * ROUNDING


def test_a_busy_machine_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [pipeline_case(kind, room, 1).question for kind in SEVERAL for room in (0.8, 0.6)]

    def answers() -> list[tuple[float, float, int]]:
        found = [choose_stages(question, effort=EXACT) for question in questions]
        return [(found_seconds(one), one.bound_seconds, one.report.calls) for one in found]

    idle = answers()
    assert max(calls for *_, calls in idle) > 2, "a limit of seconds would end after a program"
    clock = count(step=1000)  # seconds between two looks at it
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    assert answers() == idle


@pytest.mark.parametrize(("zero", "room", "seed"), WHOLE)
def test_one_stage_runs_in_the_best_of_all_mixes(zero: Zero, room: float, seed: int) -> None:
    case = whole_case(seed, zero=zero, layers=6, room=room)
    truth = brute_force(case).seconds
    answer = choose_stages(case.question)
    assert found_seconds(answer) == pytest.approx(truth, rel=1e-9)
    assert answer.bound_seconds == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("room", [0.8, 0.5])
def test_layers_save_on_the_host_where_that_is_faster_and_fits(room: float) -> None:
    is_faster = []
    for seed in (1, 2):
        case = whole_case(seed, zero=Zero.NONE, layers=4, room=room)
        there = on_host(case)
        truth, found = brute_force(there).seconds, found_seconds(choose_stages(there.question))
        assert found == pytest.approx(truth, rel=1e-9)
        is_faster.append(found < found_seconds(choose_stages(case.question)))
    assert any(is_faster)


@pytest.mark.parametrize("zero", Zero)
def test_one_stage_that_holds_least_is_found(zero: Zero) -> None:
    for seed in range(3):
        case = whole_case(seed, zero=zero, layers=5, room=1.0)
        if case.question.arrangement.is_one_pass:
            found = smallest_stages(case.question)
            assert found is not None
            assert held_bytes(case, found) == brute_force(case).least_bytes


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_the_even_cut_is_the_most_even_of_all(kind: ScheduleKind) -> None:
    for seed in range(6):
        question = random_case(seed, kind=kind, most_layers=9, room=1.0).question
        banned = replace(question, is_cuttable=(seed % 2 == 0, *question.is_cuttable[1:]))
        layers, stages, least = len(banned.classes), banned.shape.stages, least_seconds(banned)

        def squares(cut: Cut, least: Floats = least) -> float:
            return sum(float(least[first:stop].sum()) ** 2 for first, stop in pairwise(cut))

        every = [
            (0, *inner, layers)
            for inner in combinations(range(1, layers), stages - 1)
            if all(banned.is_border[place] for place in inner)
        ]
        found = even_cut(banned)
        assert found in every or (not every and found == ())
        if every:
            assert squares(found) == pytest.approx(min(map(squares, every)))


@pytest.mark.parametrize("seeds", cells((range(20), range(60)), (range(20),)), ids=len)
def test_a_quick_look_is_close_to_the_best_cut_where_stages_are_almost_as_many_as_layers(
    seeds: range,
) -> None:
    """Moves of single borders lead nowhere there, so the cut to begin with must be good."""
    every = (
        random_case(seed, kind=ScheduleKind.INTERLEAVED_1F1B, most_layers=5, room=2.0)
        for seed in seeds
    )
    cases = [one for one in every if len(one.question.classes) == one.question.shape.stages + 1]
    assert len(cases) > len(seeds) / 3
    for case in cases:
        found = choose_stages(case.question, effort=QUICK)
        assert found_seconds(found) <= 1.1 * brute_force(case).seconds


def random_small(seed: int) -> StageCase:
    kinds, rooms = list(ScheduleKind), (2.0, 1.0, 0.8, 0.6, 0.45)
    return random_case(
        seed, kind=kinds[seed % len(kinds)], most_layers=4, room=rooms[seed // 5 % len(rooms)]
    )


@cache
def random_truth(seed: int) -> tuple[StageCase, float]:
    case = random_small(seed)
    return case, brute_force(case).seconds


@pytest.mark.slow
@pytest.mark.parametrize("effort", [QUICK, THOROUGH], ids=["quick", "thorough"])
@pytest.mark.parametrize("seeds", cells((FEW, RANDOM), (FEW,)), ids=len)
def test_between_bound_and_best_lies_the_truth(seeds: range, effort: Effort) -> None:
    closest = 0.0
    for case, truth in map(random_truth, seeds):
        answer = choose_stages(case.question, effort=effort)
        assert answer.bound_seconds <= truth * ROUNDING
        assert found_seconds(answer) * ROUNDING >= truth
        if truth < math.inf:
            closest = max(closest, answer.bound_seconds / truth)
    assert closest * 1.02 > 1.0  # a bound two percent higher would have been noticed


def random_several(seed: int) -> StageCase:
    """Return a case whose ranks have several stages, which share memory that presses."""
    kind, room = SEVERAL[seed % len(SEVERAL)], (1.0, 0.85, 0.7, 0.55)[seed // 3 % 4]
    cases = (random_case(each, kind=kind, most_layers=5, room=room) for each in count(seed * 1_000))
    return next(case for case in cases if case.question.shape.stages_per_rank > 1)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", cells(((EACH,), (RANDOM,)), ((EACH,),)), ids=len)
def test_the_bound_in_whole_numbers_is_below_all_cuts_of_several_stages(
    seeds: Sequence[int],
) -> None:
    shares = []
    for case in map(random_several, seeds):
        truth = brute_force(case).seconds
        answer = choose_stages(case.question, effort=IN_WHOLE_NUMBERS)
        assert answer.bound_seconds <= truth * ROUNDING
        assert found_seconds(answer) * ROUNDING >= truth
        if truth < math.inf:
            shares.append(answer.bound_seconds / truth)
    assert max(shares) * 1.02 > 1.0  # a bound two percent higher would have been noticed
    assert median(shares) > 0.85


@pytest.mark.parametrize("seed", range(8))
def test_what_is_beaten_already_is_not_found(seed: int) -> None:
    kind = list(ScheduleKind)[seed % len(ScheduleKind)]
    case, truth = pipeline_case(kind, 0.9, 1), truth_of(kind, 0.9, 1).seconds
    answer = choose_stages(case.question, cutoff_seconds=truth * 0.98)
    assert truth * 0.98 / ROUNDING <= answer.bound_seconds <= truth * ROUNDING


@pytest.mark.parametrize("seeds", cells((FEW, range(60)), (FEW,)), ids=len)
def test_stages_too_long_for_the_cutoff_may_be_the_only_ones_that_fit(seeds: range) -> None:
    beaten = 0
    for seed in seeds:
        case = uneven_case(seed, room=(0.75, 0.95)[seed % 2])
        truth = brute_force(case).seconds
        for share in (0.88, 0.8, 0.7) if truth < math.inf else ():
            answer = choose_stages(case.question, cutoff_seconds=truth * share, effort=QUICK)
            assert answer.bound_seconds <= truth * ROUNDING
            beaten += 1
    assert beaten


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_the_smallest_stages_hold_the_least_there_is(kind: ScheduleKind) -> None:
    case = pipeline_case(kind, 2.0, 3)
    found = smallest_stages(case.question)
    assert found is not None
    assert held_bytes(case, found) == truth_of(kind, 2.0, 3).least_bytes


def held_bytes(case: StageCase, cut: PricedCut) -> int:
    """Return what the fullest rank holds."""
    question = case.question
    return max(
        memory_of(
            [cut.offers[stage].price.load for stage in stages],
            question.moments[rank],
            question.arrangement,
            question.constants,
        ).device_bytes
        for rank, stages in enumerate(question.stages_of)
    )
