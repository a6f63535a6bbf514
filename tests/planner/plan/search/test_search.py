"""The search respects everything that is declared, proves its choice, and says why it has none."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count, pairwise, product
from typing import Any

import pytest

from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.costs.prediction import Offload, Recompute, Zero
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind
from autopar.planner.errors import ExitCode, InfeasibleError, InputError, TimeLimitError
from autopar.planner.graph.layouts import WHOLE, ParameterLayout
from autopar.planner.plan.declared.constraints import Declared, RecomputePin, SplitRule, StagePin
from autopar.planner.plan.files.consistency import faults_of, layout_faults
from autopar.planner.plan.files.document import parse_plan, plan_text
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.points import Variant
from autopar.planner.plan.search.search import Explorer, search
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.precision import Compression, Precision
from autopar.planner.programs.layouts.edges import crossing_tensors
from tests.cells import cells
from tests.planner.plan.plans import model, parts_of, without_graph
from tests.planner.plan.searches import TINY_GPT2, declared, planned
from tests.planner.programs.layouts.layout_checks import check
from tests.planner.subjects import ZOO_MODELS


@pytest.fixture(autouse=True)
def no_runners_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop each search as soon as its best plan is proved: others are not looked at here."""
    monkeypatch.setattr("autopar.planner.plan.search.search.EXTRA_NODES", 0)


def rule(value: SplitRule | StagePin | RecomputePin) -> Declared:
    field = {SplitRule: "splits", StagePin: "stages", RecomputePin: "recompute"}[type(value)]
    place = f"{field} {hash(value)}"
    return Declared(place=place, field=field, value=value, text=str(value), origin="test")


DEGREES = ((1, 1, 4), (2, 1, 2), (4, 1, 1))
OTHERS = ("llama.py", "resnet.py", "t5.py")


def tiny(devices: int, *rules: Declared, **places: Any) -> Plan:
    """A plan of a small model and a small batch: there is little to enumerate."""
    demands: dict[str, Any] = {"global_batch": 8, **places}
    return planned(TINY_GPT2, choose_cluster(devices, "h100-sxm"), *rules, **demands)


def is_split(plan: Plan) -> bool:
    return any(layout.axis for layouts in plan.layouts for layout in layouts)


def test_no_rank_computes_what_another_computes() -> None:
    """Ranks of a tensor axis that all do the same would make tiny gradients cheaper to sum."""
    plan = planned(TINY_GPT2, choose_cluster(8, "a100-80gb-sxm"), global_batch=8)
    assert plan.arrangement.tensor == 1 or is_split(plan)


def test_a_pinned_tensor_degree_may_split_nothing() -> None:
    plan = tiny(2, pins__tp=2, pins__dp=1)
    assert plan.arrangement.tensor == 2
    assert not is_split(plan)


@pytest.mark.parametrize("least_seconds", [1.0, float("inf")])
def test_layouts_that_are_too_slow_are_left_out_and_not_called_too_large(
    least_seconds: float,
) -> None:
    graph, axes, layers = parts_of(*TINY_GPT2)
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    solver = Explorer(subject, choose_cluster(2, "h100-sxm"), declared(global_batch=8)).solver
    limits = dict.fromkeys(solver.demands.limit_bytes, 1)
    split = tiny(2, pins__tp=2, pins__dp=1).arrangement
    demands = replace(solver.demands, limit_bytes=limits, may_waste_ranks=True)
    answer = solver.under(demands).solve(split, least=lambda _: least_seconds, known_seconds=0.5)
    assert answer.candidate is None
    assert answer.bound_seconds == least_seconds


def assert_sound(plan: Plan, model: tuple[str, ...]) -> None:
    """The plan contradicts itself nowhere, and its layouts fit together on every edge."""
    graph, axes, layers = parts_of(*model)
    assert list(faults_of(plan)) == []
    assert list(layout_faults(plan, axes, layers)) == []
    crossing = plan.crossing
    if plan.arrangement.tensor == 1:  # everything is whole there
        names = crossing_tensors(layers)
        crossing = tuple(ParameterLayout(name=name, layout=WHOLE) for name in names)
    check(
        graph,
        axes,
        layers,
        layouts=plan.layouts,
        parameters=plan.parameters,
        crossing=crossing,
        degree=plan.arrangement.tensor,
        batch=plan.arrangement.microbatch,
    )


@pytest.mark.parametrize(
    ("name", "devices"),
    cells(
        [*product(ZOO_MODELS, (4, 8)), *product(("gpt2.py", "mnist.py", "resnet.py"), (2,))],
        [*product(ZOO_MODELS, (4,)), ("mnist.py", 2)],
    ),
)
def test_every_zoo_model_has_a_sound_and_proved_plan(name: str, devices: int) -> None:
    plan = planned((name,), choose_cluster(devices, "h100-sxm"), global_batch=2 * devices)
    assert plan.proof.gap == 0
    assert plan.proof.is_complete
    assert_sound(plan, (name,))
    memory = plan.prediction.peak_memory
    assert memory.device_bytes <= plan.machines.limit_bytes


@pytest.mark.parametrize(
    ("name", "degrees"),
    cells(
        product(("gpt2.py", *OTHERS), DEGREES),
        [*product(("gpt2.py",), DEGREES), *zip(OTHERS, DEGREES, strict=True)],
    ),
)
def test_pinned_degrees_are_kept_and_their_plans_are_sound(
    name: str, degrees: tuple[int, int, int]
) -> None:
    pipeline, data, tensor = degrees
    plan = planned(
        (name,),
        choose_cluster(4, "h100-sxm"),
        pins__pp=pipeline,
        pins__dp=data,
        pins__tp=tensor,
        global_batch=8,
    )
    one = plan.arrangement
    assert (one.pipeline, one.data, one.tensor) == degrees
    assert_sound(plan, (name,))


def test_a_plan_of_the_search_comes_back_from_its_file() -> None:
    plan = tiny(4, pins__pp=2, limits__memory="90%", choices__zero=[0, 1], precision="fp32")
    assert parse_plan(plan_text(plan), where="test") == without_graph(plan)
    assert "pp=2" in {one.text for one in plan.constraints}


@pytest.mark.parametrize(
    ("places", "field", "value"),
    [
        ({"pins__microbatch": 2}, "microbatch", 2),
        ({"pins__zero": 3, "pins__dp": 4}, "zero", Zero.PARAMETERS),
        ({"pins__zero": 2, "pins__dp": 2, "pins__pp": 2}, "zero", Zero.GRADIENTS),
        (
            {"pins__zero": 1, "pins__dp": 2, "pins__pp": 2, "pins__schedule": "zero-bubble-v"},
            "schedule",
            ScheduleKind.ZERO_BUBBLE_V,
        ),
        ({"pins__shard": 2, "pins__dp": 4, "pins__zero": 1}, "shard", 2),
        ({"pins__pp": 2, "pins__schedule": "gpipe"}, "schedule", ScheduleKind.GPIPE),
        ({"pins__pp": 2, "pins__schedule": "1f1b"}, "schedule", ScheduleKind.ONE_F_ONE_B),
        ({"pins__pp": 2, "pins__stages_per_rank": 2}, "stages_per_rank", 2),
        ({"precision": "fp32"}, "precision", Precision.FP32),
        ({"global_batch": 48}, "global_batch", 48),
        ({"pins__dp": 4, "choices__compressed_gradients": True}, "compression", Compression.HALF),
        ({"pins__dp": 4, "choices__bucket_sizes": ["1 MiB"]}, "bucket_bytes", 2**20),
    ],
)
def test_what_is_pinned_is_in_the_plan(
    places: dict[str, object], field: str, value: object
) -> None:
    plan = tiny(4, **places)
    assert getattr(plan.arrangement, field) == value
    assert_sound(plan, TINY_GPT2)


@pytest.mark.parametrize("zero", [2, 3])
def test_what_zero_bubble_keeps_whole_is_not_sharded(zero: int) -> None:
    places = {"pins__zero": zero, "pins__dp": 2, "pins__pp": 2}
    assert not SCHEDULES[tiny(4, **places).arrangement.schedule].splits_backward
    with pytest.raises(InfeasibleError, match=f"zero={zero} .* schedule=zero-bubble-v") as told:
        tiny(4, **places, pins__schedule="zero-bubble-v")
    assert told.value.expected.startswith("zero=0 or zero=1 with zero bubble")


def test_an_arrangement_that_is_solved_again_counts_once() -> None:
    graph, axes, layers = parts_of(*TINY_GPT2)
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    demands = declared(global_batch=8, objective="memory")
    explorer = Explorer(subject, choose_cluster(2, "h100-sxm"), demands)
    arrangement = next(one for point in explorer.points for one in explorer.points.variants(point))
    assert all(explorer.solve(Variant(arrangement)) for _ in range(2))
    assert explorer.solved == {arrangement}


def test_limits_are_kept() -> None:
    one = tiny(8, limits__tp=1, limits__dp=4).arrangement
    assert one.tensor == 1
    assert one.data <= 4


@pytest.mark.parametrize("mode", Recompute)
def test_modules_are_recomputed_as_declared(mode: Recompute) -> None:
    path = "lm_head" if mode.makes_chunks else "h.1"
    plan = tiny(2, rule(RecomputePin(modules=path, mode=mode)), pins__dp=2)
    _, _, layers = parts_of(*TINY_GPT2)
    graph = plan.graph
    modes = [mode for stage in plan.stages for mode in stage.recompute]
    paths = [graph.calls[layer.call].path for layer in layers.layers]
    assert modes[paths.index(path)] is mode
    assert modes[paths.index("h.0")] is Recompute.NONE


def test_a_module_runs_on_the_stage_that_is_declared() -> None:
    plan = tiny(2, rule(StagePin(modules="h.0", stage=1)), pins__pp=2, pins__schedule="1f1b")
    _, _, layers = parts_of(*TINY_GPT2)
    paths = [plan.graph.calls[layer.call].path for layer in layers.layers]
    assert plan.stages[1].first <= paths.index("h.0")


def split_axes(plan: Plan, module: str) -> set[str]:
    """Return the names of the axes along which the ops of a module in block 0 are split."""
    graph, axes, layers = parts_of(*TINY_GPT2)
    number = next(i for i, one in enumerate(layers.classes) if one.name == "Block")
    ops = layers.layers[layers.classes[number].layers[0]].ops
    return {
        axes.names[layout.axis]
        for op, layout in zip(ops, plan.layouts[number], strict=True)
        if layout.axis and graph.calls[op.call or ""].path.startswith(module)
    }


def test_a_required_split_is_made() -> None:
    plan = tiny(2, rule(SplitRule(modules="h.*.mlp", axis="ffn", is_required=True)), pins__tp=2)
    assert "ffn" in split_axes(plan, "h.0.mlp")


def test_an_axis_is_forbidden_in_a_module_alone() -> None:
    everywhere = {"pins__tp": 2, "global_batch": 4096}
    banned = rule(SplitRule(modules="h.*.attn", axis="seq", is_required=False))
    wanted = rule(SplitRule(modules="h.*.mlp", axis="seq", is_required=True))
    plan = tiny(2, banned, wanted, **everywhere)
    assert "seq" not in split_axes(plan, "h.0.attn")
    assert "seq" in split_axes(plan, "h.0.mlp")


@pytest.mark.parametrize(
    ("value", "telling"),
    [
        (SplitRule(modules="h.1.mlp", axis="ffn", is_required=True), "2 equal layers of class"),
        (SplitRule(modules="h.0", axis="heads", is_required=False), "'h.*'"),
        (SplitRule(modules="h.*.mlp", axis="vocab", is_required=True), "no such axis"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(value: SplitRule, telling: str) -> None:
    with pytest.raises(InputError) as raised:
        tiny(2, rule(value), pins__tp=2)
    assert telling in str(raised.value)


@pytest.mark.parametrize("modules", ["*", "h.*"])
def test_a_split_that_is_required_and_forbidden_is_a_contradiction(modules: str) -> None:
    wanted = rule(SplitRule(modules="h.*.mlp", axis="ffn", is_required=True))
    unwanted = rule(SplitRule(modules=modules, axis="ffn", is_required=False))
    with pytest.raises(InfeasibleError, match=r"splits ffn in 'h\.\*\.mlp', another never"):
        tiny(2, wanted, unwanted, pins__tp=2)


def test_one_tensor_rank_splits_nothing() -> None:
    plan = tiny(2, pins__dp=2)
    layouts = [one for layer_class in plan.layouts for one in layer_class]
    assert not any(one.axis for one in layouts)
    assert plan.parameters == plan.crossing == ()


@pytest.mark.parametrize(
    "places",
    [
        {"pins__pp": 2, "pins__microbatch": 2, "pins__schedule": "1f1b", "global_batch": 8},
        {"pins__dp": 2, "pins__zero": 3, "pins__microbatch": 1},
        {"pins__microbatch": 1, "choices__schedules": ["1f1b"]},
    ],
)
def test_one_byte_decides_whether_a_plan_fits(places: dict[str, object]) -> None:
    least = tiny(2, objective="memory", **places)
    needed = least.prediction.peak_memory.device_bytes
    fits = tiny(2, limits__memory=f"{needed} B", **places)
    assert fits.prediction.peak_memory.device_bytes <= needed
    with pytest.raises(InfeasibleError) as raised:
        tiny(2, limits__memory=f"{needed - 1} B", **places)
    assert f"({needed:,} B) or more" in raised.value.found
    assert raised.value.found.endswith(": 1 B short")
    assert raised.value.fix == f'allow more of the device: --memory "{needed} B"'
    assert raised.value.exit_code is ExitCode.INFEASIBLE


def save_on_host(plan: Plan) -> bool:
    """Whether some layers save on the host."""
    return any(mode.is_on_host for mode in plan.layer_modes)


def test_layers_save_on_the_host_where_nothing_else_fits() -> None:
    places: dict[str, object] = {"pins__dp": 2, "pins__zero": 3, "pins__microbatch": 1}
    needed = tiny(2, objective="memory", **places).prediction.peak_memory
    assert needed.host_bytes > 0
    fits = tiny(2, limits__memory=f"{needed.device_bytes} B", **places)
    assert save_on_host(fits)
    assert not save_on_host(tiny(2, **places))
    with pytest.raises(InfeasibleError) as raised:
        tiny(2, limits__memory=f"{needed.device_bytes} B", limits__host_memory="1 B", **places)
    assert f"{needed.host_bytes:,} B" in raised.value.found
    assert "what layers save for the backward on the host" in raised.value.found


def test_only_recomputed_layers_with_inputs_on_the_host_fit_where_both_memories_are_small() -> None:
    places: dict[str, object] = {"pins__dp": 2, "pins__zero": 3, "pins__microbatch": 1}
    places["offload"] = "none"

    def all_in(mode: Recompute, **limits: object) -> Plan:
        return tiny(2, rule(RecomputePin(modules="*", mode=mode)), **places, **limits)

    least = all_in(Recompute.FULL_HOST).prediction.peak_memory
    limits = {
        "limits__memory": f"{least.device_bytes} B",
        "limits__host_memory": f"{least.host_bytes} B",
    }
    found = tiny(2, **places, **limits)
    assert Recompute.FULL_HOST in found.layer_modes
    assert not tiny(2, **places).layer_modes.count(Recompute.FULL_HOST)
    for mode in {Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL, Recompute.HOST}:
        with pytest.raises(InfeasibleError):
            all_in(mode, **limits)


def test_layers_save_on_the_host_where_that_is_faster_than_to_compute_again() -> None:
    model = ("llama.py", "size=8b", "layers=4")
    places: dict[str, Any] = {"pins__microbatch": 8, "global_batch": 8, "offload": "none"}
    quick, slow = (
        planned(model, choose_cluster(1, device), limits__memory="60 GiB", **places)
        for device in ("gh200-96gb", "h100-sxm")
    )
    assert save_on_host(quick)
    assert not save_on_host(slow)
    assert any(mode.runs_again for mode in slow.layer_modes)


def test_a_model_far_too_large_is_told_what_it_needs() -> None:
    with pytest.raises(InfeasibleError) as raised:
        planned(("llama.py", "size=8b", "layers=8"), choose_cluster(1, "a10"), offload="none")
    assert "take more devices" in raised.value.fix


def test_an_optimizer_goes_to_the_host_where_nothing_else_fits() -> None:
    model = ("llama.py", "size=8b", "layers=8")
    plan = planned(model, choose_cluster(1, "a10"))
    assert plan.arrangement.offload is Offload.OPTIMIZER
    least = planned(
        model, choose_cluster(1, "a10"), pins__zero=3, pins__microbatch=1, objective="memory"
    )
    needed = least.prediction.peak_memory.host_bytes
    with pytest.raises(InfeasibleError) as raised:
        planned(model, choose_cluster(1, "a10"), limits__host_memory=f"{needed // 2} B")
    assert f"({needed:,} B) for each device" in raised.value.found
    roomy = planned(model, choose_cluster(1, "h200-sxm"))
    assert roomy.arrangement.offload is Offload.NONE


def test_no_plan_needs_less_than_the_one_of_least_memory() -> None:
    least = tiny(4, objective="memory").prediction.peak_memory.device_bytes
    others = [tiny(4, **{pin: 4}) for pin in ("pins__pp", "pins__dp", "pins__tp")]
    others.append(tiny(4, pins__dp=4, pins__zero=3, pins__microbatch=1))
    assert all(least <= one.prediction.peak_memory.device_bytes for one in others)


def test_least_cost_on_given_machines_is_least_time() -> None:
    assert tiny(2, objective="cost").arrangement == tiny(2).arrangement


def test_a_time_limit_that_comes_first_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(step=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with pytest.raises(TimeLimitError) as raised:
        planned(TINY_GPT2, choose_cluster(4, "h100-sxm"), time_limit_seconds=1.0)
    assert raised.value.exit_code is ExitCode.NO_PLAN
    assert "still open" in raised.value.expected


MIXED = """
[[nodes]]
device = "a100-80gb-sxm"
devices = 1
[[nodes]]
device = "a40"
devices = 1
[network]
like = "infiniband-hdr"
"""


@pytest.mark.parametrize("order", [1, -1])
def test_the_slower_of_unequal_devices_gets_fewer_layers(order: int) -> None:
    head, *nodes = MIXED.split("[[nodes]]")
    nodes[1], network = nodes[1].split("[network]")
    text = "[[nodes]]".join([head, *nodes[::order]]) + "[network]" + network
    cluster = parse_cluster(text, where="test")
    model = ("gpt2.py", "size=124m", "vocab_size=512")
    plan = planned(model, cluster, pins__pp=2, pins__schedule="1f1b", pins__microbatch=1)
    blocks = [stage.count for stage in plan.stages]  # the planner puts the faster node first
    assert blocks[0] > blocks[1]
    assert_sound(plan, model)


def test_tied_weights_are_summed_where_a_pipeline_holds_them_twice() -> None:
    plan = tiny(2, pins__pp=2)
    reasons = {one.reason for one in plan.prediction.communication}
    assert any("tied" in reason or "share" in reason for reason in reasons), reasons


def test_no_stage_ends_before_something_has_learned() -> None:
    """What a frozen embedding gives needs no gradient: it is computed on the stage that uses it."""
    graph, axes, layers = parts_of(*TINY_GPT2)
    frozen = {op.outputs[0] for op in layers.layers[0].ops} | {
        op.outputs[0] for op in layers.layers[1].ops
    }
    tensors = {
        name: replace(tensor, requires_grad=tensor.requires_grad and name not in frozen)
        for name, tensor in graph.tensors.items()
    }
    plan = search(
        replace(graph, tensors=tensors),
        axes,
        layers,
        model(graph, "gpt2.py"),
        choose_cluster(2, "h100-sxm"),
        declared(global_batch=8, pins__pp=2),
    )
    assert min(stage.count for stage in plan.stages if stage.first == 0) > 2


def test_stages_follow_each_other_without_a_gap() -> None:
    plan = planned(("t5.py",), choose_cluster(4, "h100-sxm"), pins__pp=4, global_batch=8)
    for before, after in pairwise(plan.stages):
        assert before.first + before.count == after.first


def test_the_best_plan_stands_beside_the_next_ones_though_none_of_them_can_be_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autopar.planner.plan.search.search.EXTRA_NODES", 1000)
    plan = planned(("gpt2.py", "size=124m"), choose_cluster(8, "h100-sxm"), global_batch=64)
    steps = [plan.prediction.step_seconds, *(one.step_seconds for one in plan.runners_up)]
    assert len(steps) == 1 + 4
    assert steps == sorted(steps)
    assert plan.proof.gap == 0.0


SMALL_GPT2 = ("gpt2.py", "size=124m", "layers=4")
GATHERS = {"pins__dp": 8, "pins__microbatch": 4, "global_batch": 32}
SUMS = {"limits__dp": 2, "pins__shard": 2, "pins__microbatch": 1, "global_batch": 32}


@pytest.mark.parametrize(
    ("name", "usual", "more"),
    [
        (SMALL_GPT2, GATHERS, {"pins__zero": 2}),  # which gathers beside the forward
        (TINY_GPT2, SUMS, {"offload": "optimizer"}),  # then the device adds up no gradients
    ],
    ids=str,
)
def test_plans_that_need_less_memory_may_be_the_fastest(
    name: tuple[str, ...], usual: dict[str, Any], more: dict[str, Any]
) -> None:
    cluster = choose_cluster(8, "h100-sxm")
    proved, other = (planned(name, cluster, **usual, **one) for one in ({}, more))
    assert proved.prediction.step_seconds <= other.prediction.step_seconds * (1 + 1e-9)


def test_one_microbatch_may_need_the_least_memory() -> None:
    demands: dict[str, Any] = {"objective": "memory", "offload": "none", "global_batch": 2}
    cluster = choose_cluster(1, "h100-sxm")
    found, whole = (
        planned(SMALL_GPT2, cluster, **demands, **more) for more in ({}, {"pins__microbatch": 2})
    )
    assert found.arrangement.microbatches == 1
    assert found.prediction.peak_memory == whole.prediction.peak_memory
