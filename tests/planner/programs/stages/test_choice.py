"""Tests of the choice of stages as a whole: against trying everything, and by its properties."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.planner.errors import InputError
from autopar.planner.programs.stages.choice import (
    NoStages,
    NothingBetter,
    StagePlan,
    choose_stages,
    step_seconds,
)
from autopar.planner.programs.stages.problem import (
    Cut,
    LayerChoices,
    LayerOption,
    LayerRun,
    Pin,
    StageLimit,
    StageLimits,
)
from tests.planner.programs.stages.stage_cases import Case, best_by_trying_all, cases

many = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
some = settings(max_examples=100, suppress_health_check=list(HealthCheck))

NONE = LayerOption(name="none", seconds=3.0, saved_bytes=10, fixed_bytes=20)
FULL = LayerOption(name="full", seconds=4.0, saved_bytes=1, fixed_bytes=20, transient_bytes=9)
HEAD = LayerOption(name="none", seconds=7.0, fixed_bytes=40)


def equal_layers(count: int, *options: LayerOption) -> LayerChoices:
    return LayerChoices(
        options=((options or (NONE, FULL),),), runs=(LayerRun(layer_class=0, count=count),)
    )


def one_f_one_b(stages: int, *, memory: int = 10**9, microbatches: int = 8) -> StageLimits:
    return StageLimits(
        stages=tuple(
            StageLimit(memory_bytes=memory, in_flight=min(microbatches, stages - p))
            for p in range(stages)
        ),
        microbatches=microbatches,
    )


def planned(choices: LayerChoices, limits: StageLimits) -> StagePlan:
    answer = choose_stages(choices, limits)
    assert isinstance(answer, StagePlan)
    return answer


def seconds(choices: LayerChoices, limits: StageLimits) -> float:
    answer = choose_stages(choices, limits)
    return answer.objective_seconds if isinstance(answer, StagePlan) else math.inf


def lengths(plan: StagePlan) -> list[int]:
    return [stage.stop - stage.first for stage in plan.stages]


@many
@given(cases())
def test_the_plan_is_the_best_of_all_cuts_and_options(case: Case) -> None:
    choices, limits = case
    best, answer = best_by_trying_all(choices, limits), choose_stages(choices, limits)
    if best is None:
        assert isinstance(answer, NoStages)
        return
    assert isinstance(answer, StagePlan)
    assert answer.objective_seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert answer.gap == 0.0
    assert step_seconds(answer.stages, limits) == answer.objective_seconds


@many
@given(cases())
def test_a_plan_covers_the_layers_and_keeps_to_the_memory_of_every_rank(case: Case) -> None:
    choices, limits = case
    answer = choose_stages(choices, limits)
    assume(isinstance(answer, StagePlan))
    assert isinstance(answer, StagePlan)
    ends = [stage.stop for stage in answer.stages]
    assert [stage.first for stage in answer.stages] == [0, *ends[:-1]]
    assert ends[-1] == len(choices.layers)
    for rank in range(limits.ranks):
        mine = [p for p in range(len(ends)) if limits.rank_of(p) == rank]
        # only one stage of a rank runs at a time
        resident = sum(answer.stages[p].resident_bytes for p in mine)
        transient = max(answer.stages[p].transient_bytes for p in mine)
        assert resident + transient <= limits.stages[mine[0]].memory_bytes


@some
@given(cases())
def test_memory_is_short_by_exactly_the_bytes_told(case: Case) -> None:
    choices, limits = case
    assume(limits.stages_per_rank == 1)
    answer = choose_stages(choices, limits)
    assume(isinstance(answer, NoStages) and answer.shortfall_bytes is not None)
    assert isinstance(answer, NoStages)
    assert answer.shortfall_bytes is not None
    assert isinstance(choose_stages(choices, _with_more(limits, answer.shortfall_bytes)), StagePlan)
    almost = choose_stages(choices, _with_more(limits, answer.shortfall_bytes - 1))
    assert almost == NoStages(shortfall_bytes=1)


def _with_more(limits: StageLimits, more_bytes: int) -> StageLimits:
    stages = (replace(s, memory_bytes=s.memory_bytes + more_bytes) for s in limits.stages)
    return replace(limits, stages=tuple(stages))


@some
@given(cases(), st.integers(1, 20))
def test_more_memory_is_never_slower(case: Case, more_bytes: int) -> None:
    choices, limits = case
    assume(limits.stages_per_rank == 1)
    assert seconds(choices, _with_more(limits, more_bytes)) <= seconds(choices, limits) * (1 + 1e-9)


@some
@given(cases(), st.integers(1, 8))
def test_more_microbatches_are_never_faster(case: Case, more: int) -> None:
    choices, limits = case
    longer = replace(limits, microbatches=limits.microbatches + more)
    assert seconds(choices, longer) >= seconds(choices, limits) * (1 - 1e-9)


@some
@given(cases(), st.data())
def test_a_forbidden_cut_is_never_faster(case: Case, data: st.DataObject) -> None:
    choices, limits = case
    cuts = list(choices.boundaries[1:-1])
    assume(cuts)
    place = data.draw(st.integers(0, len(cuts) - 1))
    cuts[place] = replace(cuts[place], is_allowed=False)
    before = seconds(choices, limits)
    assert seconds(replace(choices, cuts=tuple(cuts)), limits) >= before * (1 - 1e-9)


@some
@given(cases())
def test_a_cutoff_keeps_what_is_below_it_and_nothing_else(case: Case) -> None:
    choices, limits = case
    best = seconds(choices, limits)
    assume(0.0 < best < math.inf)
    kept = choose_stages(choices, limits, cutoff_seconds=best * 1.001)
    assert isinstance(kept, StagePlan)
    assert kept.objective_seconds == pytest.approx(best, rel=1e-9)
    dropped = choose_stages(choices, limits, cutoff_seconds=best)
    assert isinstance(dropped, NothingBetter)
    assert dropped.bound_seconds == pytest.approx(best)


def test_one_stage_needs_no_solver() -> None:
    # 12·20 bytes are fixed, 12·1 saved at least, 9 transient; 348 − 261 = 87 = 9·(10 − 1) + 6
    answer = planned(equal_layers(12), one_f_one_b(1, memory=348))
    assert answer.report.calls == 0
    assert answer.stages[0].options == ("none",) * 9 + ("full",) * 3
    assert answer.objective_seconds == pytest.approx(8 * (9 * 3.0 + 3 * 4.0))


def test_layers_that_keep_more_come_first() -> None:
    stage = planned(equal_layers(4, FULL, NONE), one_f_one_b(1, memory=111)).stages[0]
    assert stage.options == ("none", "none", "full", "full")


def test_a_heavy_head_makes_the_stages_uneven() -> None:
    # 14 layers of 3 s and a head of 7 s on 4 stages, by hand: 12 + 12 + 12 + (6 + 7) s, so that the
    # bottleneck is 13 s; no plan has 12 s, for 49 s > 48 s
    choices = LayerChoices(
        options=(((NONE,), (HEAD,)),),
        runs=(LayerRun(layer_class=0, count=14), LayerRun(layer_class=1, count=1)),
    )
    answer = planned(choices, one_f_one_b(4))
    assert lengths(answer) == [4, 4, 4, 3]
    assert answer.objective_seconds == pytest.approx(7 * 13.0 + 49.0)


def test_equal_plans_are_decided_for_even_stages_and_simple_options() -> None:
    free = replace(FULL, seconds=NONE.seconds)
    answer = planned(equal_layers(12, NONE, free), one_f_one_b(4, microbatches=1))
    assert lengths(answer) == [3, 3, 3, 3]
    assert {name for stage in answer.stages for name in stage.options} == {"none"}


def test_a_faster_device_gets_more_layers() -> None:
    fast, slow = replace(NONE, seconds=1.0), NONE
    choices = LayerChoices(
        options=(((fast,),), ((slow,),)), runs=(LayerRun(layer_class=0, count=12),)
    )
    stages = (StageLimit(memory_bytes=10**6), StageLimit(memory_bytes=10**6, device_class=1))
    assert lengths(planned(choices, StageLimits(stages=stages, microbatches=8))) == [9, 3]


def test_a_pin_and_a_forbidden_cut_move_the_boundary() -> None:
    limits = one_f_one_b(2)
    pinned = replace(equal_layers(8), pins=(Pin(layer=5, stage=0),))
    assert lengths(planned(pinned, limits)) == [6, 2]
    cuts = tuple(Cut(is_allowed=place != 4) for place in range(1, 8))
    assert lengths(planned(replace(equal_layers(8), cuts=cuts), limits)) in ([3, 5], [5, 3])


@pytest.mark.parametrize(
    "choices",
    [
        replace(equal_layers(8), pins=(Pin(layer=5, stage=0), Pin(layer=2, stage=1))),
        replace(equal_layers(8), pins=(Pin(layer=0, stage=1),)),
        replace(equal_layers(8), pins=(Pin(layer=5, stage=2),)),
        replace(equal_layers(8), cuts=(Cut(is_allowed=False),) * 7),
        equal_layers(1),
    ],
)
def test_a_contradiction_is_not_blamed_on_memory(choices: LayerChoices) -> None:
    assert choose_stages(choices, one_f_one_b(2)) == NoStages(shortfall_bytes=None)


def test_a_cut_across_nodes_weighs_more() -> None:
    cut = Cut(beginning_seconds=0.5, ending_seconds=0.25)
    choices = replace(equal_layers(8), cuts=(cut,) * 7)
    limits = one_f_one_b(2)
    across = replace(limits, stages=(limits.stages[0], replace(limits.stages[1], cut_scale=4.0)))
    near, far = planned(choices, limits), planned(choices, across)
    assert [stage.seconds for stage in near.stages] == [12.25, 12.5]
    assert [stage.seconds for stage in far.stages] == [13.0, 14.0]


@pytest.mark.parametrize("per_rank", [1, 2])
def test_depth_costs_neither_solver_calls_nor_variables(per_rank: int) -> None:
    # what grows with depth is the table of intervals, not what is left for the solver
    reports = []
    for layers in (12, 120):
        stage = StageLimit(memory_bytes=layers * 30 * per_rank, in_flight=4)
        limits = StageLimits(
            stages=(stage,) * (4 * per_rank), microbatches=8, stages_per_rank=per_rank
        )
        answer = planned(equal_layers(layers), limits)
        assert answer.gap == 0.0
        reports.append((answer.report.calls, answer.report.variables))
    assert reports == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        (lambda: equal_layers(0), "at least one layer"),
        (lambda: equal_layers(1, replace(NONE, seconds=-1.0)), "finite"),
        (lambda: equal_layers(1, replace(NONE, seconds=math.nan)), "finite"),
        (lambda: replace(equal_layers(3), cuts=(Cut(),)), "2 cuts"),
        (lambda: replace(equal_layers(3), pins=(Pin(layer=3, stage=0),)), "layer 3"),
        (lambda: replace(one_f_one_b(3), stages_per_rank=2), "do not fill"),
        (lambda: replace(one_f_one_b(3), microbatches=0), "at least 1"),
    ],
)
def test_a_faulty_question_is_told(faulty: object, said: str) -> None:
    assert callable(faulty)
    with pytest.raises(InputError, match=said):
        faulty()
