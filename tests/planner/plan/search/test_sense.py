"""The search rediscovers what people know, for the reason for which they know it."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.plan.declared.constraints import Declared, RecomputePin, StagePin
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.explanation import StepPart, part_seconds
from tests.planner.plan.searches import planned, term, terms, two_nodes

GPT3 = ("gpt2.py", "size=175b", "layers=24")  # a quarter of its layers, on a quarter of its nodes
GPT3_DEMANDS: dict[str, Any] = {
    "global_batch": 128,
    "choices__schedules": ["1f1b"],
    "pins__microbatch": 1,
}


@pytest.fixture(scope="module")
def gpt3() -> Plan:
    """GPT-3 on nodes of eight A100, as it was trained: 1F1B, one row at a time."""
    return planned(GPT3, choose_cluster(16, "a100-80gb"), **GPT3_DEMANDS)


def test_gpt3_is_tensor_parallel_inside_the_node_and_a_pipeline_across(gpt3: Plan) -> None:
    one = gpt3.arrangement
    assert 1 < one.tensor <= 8
    assert one.pipeline * one.tensor == 16
    assert gpt3.proof.gap == 0


def test_tensor_parallelism_across_nodes_loses_by_its_communication(gpt3: Plan) -> None:
    wide = planned(GPT3, choose_cluster(16, "a100-80gb"), pins__tp=16, **GPT3_DEMANDS)
    lost = wide.prediction.step_seconds - gpt3.prediction.step_seconds
    assert lost > 0
    more = term(wide, "tensor communication") - term(gpt3, "tensor communication")
    assert more > lost / 2


def test_data_parallelism_of_gpt3_loses_by_its_communication(gpt3: Plan) -> None:
    """Ranks that share a copy must gather it: 16 × 80 GiB do not hold two copies of its state."""
    demands = {**GPT3_DEMANDS, "pins__dp": 4, "limits__tp": 8, "offload": "none"}
    sharded = planned(GPT3, choose_cluster(16, "a100-80gb"), **demands)
    assert sharded.arrangement.zero is Zero.PARAMETERS
    lost = sharded.prediction.step_seconds - gpt3.prediction.step_seconds
    more = term(sharded, "exposed data parallel") - term(gpt3, "exposed data parallel")
    assert more > lost / 2 > 0
    memories = [one.memory for one in gpt3.prediction.stages]
    state = sum(m.parameter_bytes + m.gradient_bytes + m.optimizer_bytes for m in memories)
    assert 2 * state * gpt3.arrangement.tensor > 16 * gpt3.machines.limit_bytes


GPT2 = ("gpt2.py", "size=124m")


@pytest.fixture(scope="module")
def gpt2() -> Plan:
    """GPT-2 124M on one node of eight A100."""
    return planned(GPT2, choose_cluster(8, "a100-80gb"), global_batch=64)


def test_a_small_model_in_one_node_is_purely_data_parallel(gpt2: Plan) -> None:
    one = gpt2.arrangement
    assert (one.pipeline, one.data, one.tensor) == (1, 8, 1)
    assert {mode for stage in gpt2.stages for mode in stage.recompute} == {Recompute.NONE}
    assert gpt2.proof.gap == 0


@pytest.mark.parametrize(
    ("pin", "part"), [("pins__tp", StepPart.COMMUNICATION), ("pins__pp", StepPart.BUBBLE)]
)
def test_splitting_a_small_model_costs_communication_or_a_bubble(
    gpt2: Plan, pin: str, part: StepPart
) -> None:
    other = planned(GPT2, choose_cluster(8, "a100-80gb"), global_batch=64, **{pin: 4})
    assert other.prediction.step_seconds > gpt2.prediction.step_seconds
    assert part_seconds(other.prediction, part) > 2 * part_seconds(gpt2.prediction, part)


LLAMA = ("llama.py", "size=8b", "seq_len=32768")
LLAMA_DEMANDS: dict[str, Any] = {"global_batch": 8, "pins__microbatch": 1, "limits__pp": 1}


@pytest.fixture(scope="module")
def llama() -> Plan:
    """Llama 8B on rows of 32,768 tokens and one node of eight H100."""
    return planned(LLAMA, choose_cluster(8, "h100-sxm"), **LLAMA_DEMANDS)


def test_a_long_context_is_recomputed_or_sharded_before_memory_runs_out(llama: Plan) -> None:
    memory = llama.prediction.peak_memory
    assert memory.device_bytes <= llama.machines.limit_bytes
    assert memory.activation_bytes > memory.parameter_bytes + memory.gradient_bytes
    recomputes = any(mode is not Recompute.NONE for mode in llama.stages[0].recompute)
    assert recomputes or llama.arrangement.tensor > 1 or llama.arrangement.zero > Zero.NONE


def test_a_short_context_of_the_same_model_recomputes_less(llama: Plan) -> None:
    short = planned(
        ("llama.py", "size=8b", "seq_len=2048"), choose_cluster(8, "h100-sxm"), **LLAMA_DEMANDS
    )
    memory, other = short.prediction.peak_memory, llama.prediction.peak_memory
    assert memory.activation_bytes < other.activation_bytes / 2
    step, other_step = short.prediction.step_seconds, llama.prediction.step_seconds
    assert term(short, "recompute") / step < term(llama, "recompute") / other_step


def test_a_long_context_without_recomputation_needs_more_splitting(llama: Plan) -> None:
    never = Declared(
        place="recompute 1",
        field="recompute",
        value=RecomputePin(modules="*", mode=Recompute.NONE),
        text="recompute none in *",
        origin="test",
    )
    kept = planned(LLAMA, choose_cluster(8, "h100-sxm"), never, **LLAMA_DEMANDS)
    assert term(kept, "recompute") == 0
    assert kept.prediction.step_seconds > llama.prediction.step_seconds
    split = "tensor communication", "exposed data parallel"
    assert terms(kept, split) > terms(llama, split)


MEDIUM = ("gpt2.py", "size=355m")


def test_a_slow_network_carries_less_data_parallel_traffic() -> None:
    quick, slow = (
        planned(MEDIUM, two_nodes(network, devices=2), global_batch=32, pins__microbatch=4)
        for network in ("infiniband-ndr", "ethernet-10")
    )
    assert quick.arrangement.data == 4
    assert slow.arrangement.data < 4
    forced = planned(
        MEDIUM, two_nodes("ethernet-10", devices=2), global_batch=32, pins__microbatch=4, pins__dp=4
    )
    assert forced.prediction.step_seconds > slow.prediction.step_seconds
    spared = term(forced, "exposed data parallel") - term(slow, "exposed data parallel")
    assert spared > forced.prediction.step_seconds - slow.prediction.step_seconds


HEAVY = ("gpt2.py", "size=124m", "layers=8", "dropout=0.0")
HEAVY_DEMANDS: dict[str, Any] = {"pins__pp": 4, "global_batch": 32, "pins__microbatch": 1}


def test_a_heavy_head_gets_fewer_blocks_beside_it() -> None:
    """The head of GPT-2 weighs as much as four and a half of its blocks."""
    cluster = choose_cluster(4, "a100-80gb")
    plan = planned(HEAVY, cluster, pins__schedule="1f1b", **HEAVY_DEMANDS)
    last = plan.stages[-1]
    assert last.count < max(stage.count for stage in plan.stages)
    even = [
        Declared(
            place=f"stages {number}",
            field="stages",
            value=StagePin(modules=f"h.{number}", stage=number // 2),
            text=f"h.{number} on stage {number // 2}",
            origin="test",
        )
        for number in range(8)
    ]
    pinned = planned(HEAVY, cluster, *even, pins__schedule="1f1b", **HEAVY_DEMANDS)
    assert pinned.prediction.step_seconds > plan.prediction.step_seconds
    assert slowest(pinned) > slowest(plan)
    assert busiest(pinned) == 3


def slowest(plan: Plan) -> float:
    """Return the seconds of one microbatch on the slowest stage."""
    return max(one.forward_seconds + one.backward_seconds for one in plan.prediction.stages)


def busiest(plan: Plan) -> int:
    """Return the stage that the others wait for."""
    stages = plan.prediction.stages
    return max(
        range(len(stages)), key=lambda i: stages[i].forward_seconds + stages[i].backward_seconds
    )
