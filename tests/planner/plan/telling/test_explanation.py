"""An explanation says what bounds a plan, where its memory goes and what is split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.costs.ops.measurements import Provenance
from autopar.planner.costs.prediction import TimeTerm, Zero
from autopar.planner.layers import Layers
from autopar.planner.plan.declared.constraints import Constraints, constraints_of
from autopar.planner.plan.declared.file import parse_pins
from autopar.planner.plan.plan import Plan, RunnerUp, StoredPlan
from autopar.planner.plan.telling.comparison import compare
from autopar.planner.plan.telling.explanation import (
    TERM_PARTS,
    StepPart,
    critical_stage,
    explain,
    part_seconds,
    proof_line,
)
from autopar.planner.plan.telling.words import (
    arrangement_words,
    degrees_words,
    other_words,
    recompute_words,
)
from autopar.planner.plan.why_not import why_not
from autopar.planner.precision import Outer
from tests.planner.plan.plans import (
    arrangement,
    parts_of,
    prediction,
    proof,
    runner_up,
    small_plan,
    split_plan,
)


def axes_and_layers(name: str) -> tuple[GraphAxes, Layers]:
    return parts_of(name)[1:]


def pins(text: str) -> Constraints:
    return constraints_of(parse_pins([text], option="--why-not"))


def with_terms(**seconds: float) -> Plan:
    terms = tuple(
        TimeTerm(name=name.replace("_", " "), seconds=value, provenance=Provenance.FORMULA)
        for name, value in seconds.items()
    )
    return small_plan(prediction=prediction(terms=terms, step_seconds=sum(seconds.values())))


def test_shares_sum_to_the_step() -> None:
    explanation = explain(small_plan())
    assert sum(share.share for share in explanation.shares) == pytest.approx(1)
    assert explanation.bound is StepPart.COMPUTE


def test_the_page_names_what_it_adds_up_and_advises_what_there_is() -> None:
    plain = explain(with_terms(compute=65, recompute=0, optimizer=2, host_overhead=33))
    assert plain.reasons[0].startswith("compute + optimizer take 67% of the step")
    assert "recomputed" not in plain.reasons[0]
    again = explain(with_terms(compute=65, recompute=20, host_overhead=15))
    assert "fewer recomputed layers" in again.reasons[0]
    alone = explain(with_terms(compute=7, host_overhead=3))
    assert alone.reasons[0].startswith("compute takes 70% of the step")


@pytest.mark.parametrize(
    ("plan", "bound"),
    [
        (with_terms(compute=3, tensor_communication=2, exposed_data_parallel=2), "communication"),
        (with_terms(compute=3, pipeline_bubble=4), "pipeline bubble"),
        (with_terms(compute=2, recompute=2, pipeline_bubble=3), "compute"),
        (with_terms(compute=1, host_overhead=2), "overhead"),
        (with_terms(compute=1, something_new=2), "overhead"),
    ],
)
def test_what_takes_most_of_the_step_bounds_it(plan: Plan, bound: str) -> None:
    explanation = explain(plan)
    assert bound in explanation.bound
    assert bound in explanation.reasons[0]


def test_full_memory_is_named_as_a_bound() -> None:
    tight = small_plan()
    tight = replace(tight, machines=replace(tight.machines, limit_bytes=105 * 2**20))
    assert "memory bounds the choice too" in explain(tight).reasons[1]
    assert "memory is no limit" in explain(small_plan()).reasons[1]


def test_the_critical_stage_is_the_one_that_idles_least() -> None:
    assert critical_stage(prediction(3)) == 0
    slow = prediction(2)
    last = replace(slow.stages[1], idle_seconds=0.0)
    assert critical_stage(replace(slow, stages=(slow.stages[0], last))) == 1


def test_memory_is_told_for_every_stage_and_sums_to_the_device() -> None:
    explanation = explain(small_plan(pipeline=2))
    assert [one.stage for one in explanation.memory] == [0, 1]
    for one in explanation.memory:
        assert sum(size for _, size in one.categories) == one.device_bytes
    assert explanation.memory[0].share_of_limit == pytest.approx(100 / 120)


def test_the_proof_line_is_certain_or_names_the_gap() -> None:
    assert "No better plan exists" in proof_line(small_plan())
    late = proof_line(small_plan(proof=proof(gap=0.025, is_complete=False)))
    assert "gap 2.50%" in late
    assert "time limit" in late


def test_the_proof_line_of_a_simpler_plan_tells_the_fastest_and_the_distance_to_it() -> None:
    plan = small_plan()
    fastest = runner_up(step_seconds=plan.prediction.step_seconds / 1.02)
    told = proof_line(replace(plan, fastest=fastest))
    assert f"No plan in this space is faster than {seconds_text(fastest.step_seconds)}" in told
    assert "and 2.0% slower" in told
    assert "No better plan" not in told


def test_a_split_axis_and_its_conversions_are_told_in_peoples_names() -> None:
    block = next(one for one in split_plan().classes if one.layers > 1)
    assert {line.axis for line in block.splits} == {"ffn"}
    gives = {(line.module, line.gives) for line in block.splits}
    assert ("mlp.c_fc", "split along ffn") in gives
    assert ("mlp.c_proj", "partial sums") in gives
    conversions = {(c.produced, c.needed, c.forward, c.backward) for c in block.conversions}
    assert ("whole", "whole, its gradient partial", "nothing", "all-reduce") in conversions
    assert ("partial sums", "whole", "all-reduce", "nothing") in conversions


def test_a_plan_that_splits_nothing_converts_nothing() -> None:
    for one in small_plan("gpt2.py").classes:
        assert one.splits == ()
        assert one.conversions == ()


@pytest.mark.parametrize(
    ("wanted", "telling"),
    [
        ("dp=2", "the plan has it"),
        ("tp=3", "on 2 devices no plan satisfies tp=3"),
        ("pp=2", "not among the plans that were kept"),
    ],
)
def test_why_not_has_a_reason_without_solving(wanted: str, telling: str) -> None:
    answer = why_not(small_plan(), pins(wanted))
    assert answer.alternative is None
    assert telling in answer.reasons[0]


def test_why_not_sees_the_pins_of_a_plan_with_local_steps() -> None:
    local = arrangement(shard=1, sync_every=64, outer=Outer.NESTEROV)
    assert why_not(small_plan(arrangement=local), pins("dp=2")).reasons == ("the plan has it",)


def test_why_not_compares_with_the_best_runner_up_and_names_what_decides() -> None:
    slow = runner_up(step_seconds=0.02)
    answer = why_not(small_plan(runners_up=(slow, runner_up())), pins("tp=2"))
    assert answer.alternative == runner_up()
    told = "\n".join(answer.reasons)
    # communication 4 ms instead of 2, no bubble instead of 1 ms, so compute 1 ms more of 2 ms
    assert "+20.0%" in told
    assert "communication +2 ms" in told
    assert "bubble −1 ms" in told
    assert "compute +1 ms" in told
    assert "communication decides" in told
    assert "−20 MiB" in told


@pytest.mark.parametrize("wanted", ["shard=1", "microbatch=1"])
def test_why_not_asks_the_solver_if_a_better_plan_with_the_pins_may_not_be_listed(
    wanted: str,
) -> None:
    listed = runner_up(arrangement=arrangement(data=1, tensor=2, shard=1, microbatch=1))
    faster = runner_up(step_seconds=0.011)
    plan = small_plan(runners_up=(listed,))
    assert why_not(plan, pins(wanted), lambda *_: faster).alternative == faster


def test_why_not_asks_the_solver_for_what_is_not_known() -> None:
    asked: list[Constraints] = []

    def solve(plan: StoredPlan, wanted: Constraints) -> RunnerUp | str:
        del plan
        asked.append(wanted)
        return runner_up() if len(asked) == 1 else "it needs 200 GiB"

    assert why_not(small_plan(), pins("pp=2"), solve).alternative == runner_up()
    assert why_not(small_plan(), pins("pp=2"), solve).reasons == ("it needs 200 GiB",)
    assert asked[0].pipeline == 2


def test_words_leave_out_what_is_not_split() -> None:
    assert degrees_words(arrangement(data=1)) == "one device"
    assert degrees_words(arrangement(pipeline=2, tensor=4)) == "pp 2 · dp 2 · tp 4"
    assert "microbatch" in arrangement_words(arrangement())


def test_another_plan_of_the_same_degrees_is_told_by_what_differs() -> None:
    chosen = arrangement(data=2, shard=1, microbatches=8)
    assert other_words(replace(chosen, data=1, tensor=2), chosen) == "tp 2"
    sharded = replace(chosen, zero=Zero.OPTIMIZER, shard=2)
    assert other_words(sharded, chosen) == "dp 2, ZeRO-1"
    assert other_words(replace(sharded, microbatches=4), sharded).startswith("dp 2, 4 microbatches")


def test_recompute_is_told_as_a_mix() -> None:
    assert recompute_words(small_plan("gpt2.py").stages) == "full"
    mixed = small_plan("gpt2.py", pipeline=2).stages
    assert recompute_words(mixed).startswith("full ")
    assert recompute_words(mixed[:1]) == "none"


def test_every_known_term_has_a_part() -> None:
    assert sum(part_seconds(small_plan().prediction, part) for part in StepPart) == pytest.approx(
        0.01
    )
    assert set(TERM_PARTS.values()) | {StepPart.OVERHEAD} == set(StepPart)


def test_a_plan_does_not_differ_from_itself() -> None:
    same = compare(small_plan("gpt2.py"), small_plan("gpt2.py"))
    assert (same.warnings, same.changes, same.layouts) == ((), (), ())
    assert all(figure.before == figure.after for figure in same.figures)


@pytest.mark.parametrize(("usd_per_hour", "told"), [(5.0, True), (None, False)])
def test_the_price_of_what_is_trained_on_is_told_where_both_prices_are_known(
    usd_per_hour: float | None, *, told: bool
) -> None:
    plan = small_plan("gpt2.py")
    dearer = replace(plan, machines=replace(plan.machines, usd_per_hour=usd_per_hour))
    figures = compare(plan, dearer).figures
    prices = [(one.before, one.after) for one in figures if one.unit == "USD"]
    # 16 rows in a step of 0.01 s are 1,600 a second: 2.5 USD / 3600 s / 1600 × a million
    assert prices == ([pytest.approx((0.434028, 0.868056), rel=1e-5)] if told else [])


def test_what_moved_is_told_in_words() -> None:
    found = compare(small_plan("gpt2.py"), split_plan())
    moved = {change.what: (change.before, change.after) for change in found.changes}
    assert moved["tensor (tp)"] == ("1", "2")
    assert moved["data (dp)"] == ("2", "1")
    assert "pipeline (pp)" not in moved
    layouts = {change.what: (change.before, change.after) for change in found.layouts}
    assert layouts["Block.mlp.c_fc"] == ("not split", "split along ffn")
    assert any("global batches differ" in warning for warning in found.warnings)


def test_other_models_and_machines_are_warned_of() -> None:
    one, other = small_plan(), small_plan("gpt2.py")
    other = replace(other, machines=replace(other.machines, content_hash="d" * 64))
    found = compare(one, other)
    assert "the models differ: mnist and gpt2" in found.warnings
    assert any("machines differ" in warning for warning in found.warnings)
