"""The bound of divisible layers: never above the best of all cuts, and close to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

import pytest

from autopar.planner.costs.prediction import Arrangement, LayerCost, Offload
from autopar.planner.costs.schedules.paths import Chains, first_chains
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.programs.stages.choice import EXACT, THOROUGH, Chooser
from autopar.planner.programs.stages.divisible import Divisible
from tests.cells import cells
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER
from tests.planner.programs.stages.stage_cases import (
    StageCase,
    best_within,
    brute_force,
    choose_stages,
    equal_case,
    on_host,
    prices,
    random_case,
)

KINDS = tuple(ScheduleKind)
USUAL = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED_1F1B)
ROOMS = (2.0, 0.8, 0.6)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no cut beats: of divisible layers, with whole numbers on ranks, with short stages."""

    divided: float
    whole: float
    short: float


def bounds_of(case: StageCase, truth: float) -> Bounds:
    chains = Chains(first_chains(case.question.arrangement.schedule, case.question.shape))
    chooser = Chooser(case.question, EXACT, chains)
    longest = len(case.question.classes)
    program = Divisible(case.question, chooser.columns.transfers, chains, longest=longest)
    divided = program.solve(enough_seconds=math.inf, most_simulated=60).bound_seconds
    asked = 1.02 * truth if truth < math.inf else 2.0 * divided
    whole = program.solve_whole(below_seconds=asked - chooser.once).bound_seconds
    short = program.with_short_stages(below_seconds=asked - chooser.once)
    return Bounds(*(one + chooser.once for one in (divided, whole, short)))


PIPELINE = replace(
    ARRANGEMENT, pipeline=2, microbatches=4, schedule=ScheduleKind.INTERLEAVED_1F1B,
    stages_per_rank=2, bucket_bytes=2_000_000,
)  # fmt: skip
SMALL = replace(LAYER, gradient_bytes=4_000, parameter_bytes=2_000, trainable=1_000)
LARGE = replace(LAYER, gradient_bytes=40_000_000, trainable=10_000_000)
REPLICATED = replace(LARGE, replicated_gradient_bytes=LARGE.gradient_bytes)
SAVING = replace(SMALL, saved_bytes=100_000_000, learning_bytes=0)


@pytest.mark.parametrize(
    ("arrangement", "layer", "share"),
    [
        pytest.param(PIPELINE, replace(SMALL, trainable_tensors=50), 0.97, id="casts"),
        pytest.param(replace(PIPELINE, tensor=2), REPLICATED, 0.945, id="sums over tensor ranks"),
        pytest.param(replace(PIPELINE, offload=Offload.OPTIMIZER), LARGE, 0.97, id="to the host"),
        pytest.param(PIPELINE, SAVING, 0.9, id="from the host"),
        pytest.param(PIPELINE, replace(SMALL, trainable=50_000_000), 0.97, id="large updates"),
        pytest.param(
            replace(PIPELINE, data=64, bucket_bytes=30_000_000), LARGE, 0.97, id="large buckets"
        ),
    ],
)
def test_equal_layers_hardly_take_longer_than_divisible_ones(
    arrangement: Arrangement, layer: LayerCost, share: float
) -> None:
    case = equal_case(arrangement, layer, room=0.5 if layer is SAVING else 2.0)
    answer = choose_stages(case.question, effort=THOROUGH)
    assert answer.best
    divided = bounds_of(case, answer.best.seconds).divided
    assert share * answer.best.seconds < divided <= answer.best.seconds


@pytest.mark.slow
@pytest.mark.parametrize("seeds", cells((range(10), range(10, 120)), (range(10),)), ids=len)
@pytest.mark.parametrize("kind", cells(KINDS, USUAL))
def test_no_cut_is_below_that_of_divisible_or_whole_layers(
    kind: ScheduleKind, seeds: range
) -> None:
    shares: list[Bounds] = []
    for seed in seeds:
        cases = [random_case(seed, kind=kind, most_layers=5, room=room) for room in ROOMS]
        priced = list(prices(cases[0]))  # which are the same in any room
        for case in cases:
            truth = best_within(case, priced).seconds
            bounds = bounds_of(case, truth)
            assert bounds.divided <= truth * (1 + 1e-6)
            assert bounds.whole <= truth * (1 + 1e-6)
            assert bounds.short <= truth * (1 + 1e-6)
            if truth < math.inf:
                shares.append(
                    Bounds(*(each / truth for each in (bounds.divided, bounds.whole, bounds.short)))
                )
    assert median(one.divided for one in shares) > 0.8  # four layers on four stages are not parts
    assert max(one.divided for one in shares) * 1.02 > 1.0  # a bound 2 % higher would be noticed
    assert max(one.whole for one in shares) * 1.01 > 1.0
    assert max(one.short for one in shares) * 1.01 > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", cells((4, 34), (4,)))
@pytest.mark.parametrize("kind", cells(KINDS, (*USUAL, ScheduleKind.ZERO_BUBBLE_V)))
def test_no_cut_with_layers_on_the_host_is_below_either(kind: ScheduleKind, seed: int) -> None:
    case = on_host(random_case(seed, kind=kind, most_layers=4, room=0.8))
    truth = brute_force(case).seconds
    bounds = bounds_of(case, truth)
    assert max(bounds.divided, bounds.whole, bounds.short) <= truth * (1 + 1e-6)


def test_short_stages_wait_for_more_of_what_is_on_the_host() -> None:
    case = equal_case(PIPELINE, SAVING, room=0.5)
    best = choose_stages(case.question, effort=THOROUGH).best
    assert best
    chains = Chains(first_chains(case.question.arrangement.schedule, case.question.shape))
    chooser = Chooser(case.question, THOROUGH, chains)
    chooser.ask(best.seconds, THOROUGH)
    below = 0.97 * best.seconds - chooser.once
    divided = chooser.divisible().solve(enough_seconds=math.inf, most_simulated=60).bound_seconds
    shorter = chooser.last_divisible().with_short_stages(below_seconds=below)
    print(divided / best.seconds, shorter / best.seconds, below / best.seconds)
    assert divided < 0.96 * below
    assert shorter == below
