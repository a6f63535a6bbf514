"""One published run from its row to its step, through the ordinary trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.costs.prediction import Recompute
from benchmarks.validation.host_work import published_constants, with_host
from benchmarks.validation.outcome import MemoryKind, memory_kind, validate_rows
from benchmarks.validation.predict_row import predict_row
from benchmarks.validation.report import report_of
from benchmarks.validation.table import Row
from tests.benchmarks.validation.rows import a_row
from tests.clock import least_seconds
from tests.planner.costs.step_factories import LAYER

ZOO = Path(__file__).parents[3] / "models_zoo"
CONSTANTS = published_constants()


def seconds_of(row: Row) -> dict[str, float]:
    prediction = predict_row(row, ZOO, CONSTANTS).prediction
    return {term.name: term.seconds for term in prediction.terms} | {
        "step": prediction.step_seconds
    }


def test_more_microbatches_take_proportionally_longer(tmp_path: Path) -> None:
    few, many = (
        seconds_of(a_row(tmp_path, global_batch=batch))["compute"] for batch in ("8", "32")
    )
    assert many == pytest.approx(4 * few)


def test_full_recomputation_costs_time_and_saves_memory(tmp_path: Path) -> None:
    kept, again = (
        predict_row(a_row(tmp_path, recompute=mode, seq_len="512"), ZOO, CONSTANTS).prediction
        for mode in ("none", "full")
    )
    assert again.step_seconds > kept.step_seconds
    assert again.peak_memory.activation_bytes < kept.peak_memory.activation_bytes


def test_scores_in_memory_cost_time_and_memory(tmp_path: Path) -> None:
    flash, eager = (
        predict_row(
            a_row(tmp_path, flash_attention=flag, seq_len="2048", micro_batch="4"), ZOO, CONSTANTS
        ).prediction
        for flag in ("True", "False")
    )
    assert eager.step_seconds > flash.step_seconds
    assert eager.peak_memory.activation_bytes > flash.peak_memory.activation_bytes


def test_an_attention_bias_has_every_score_computed(tmp_path: Path) -> None:
    causal, biased = (
        seconds_of(a_row(tmp_path, model_family=family, seq_len="4096"))["compute"]
        for family in ("gpt", "gpt(mpt)")
    )
    assert biased > causal


def test_the_same_llama_is_split_by_its_key_heads(tmp_path: Path) -> None:
    whole, split = (
        seconds_of(
            a_row(
                tmp_path, model_family="llama", kv_heads="2", tp=tp, dp=dp, hidden="1024",
                ffn_hidden="4096", seq_len="1024", global_batch="32",
            )
        )
        for tp, dp in (("1", "4"), ("2", "2"))
    )  # fmt: skip
    assert whole["tensor communication"] == 0
    assert split["tensor communication"] > 0


def test_a_distributed_optimizer_gathers_beside_the_forward(tmp_path: Path) -> None:
    row = a_row(
        tmp_path, fsdp="distributed optimizer", hidden="4096", ffn_hidden="16384", seq_len="2048"
    )
    (gather,) = (
        term
        for term in predict_row(row, ZOO, CONSTANTS).prediction.communication
        if term.collective == "all-gather"
    )
    assert 0 < gather.exposed_seconds < gather.seconds


def test_deepspeed_holds_gradients_of_16_bits_beside_those_of_32(tmp_path: Path) -> None:
    plain, both, narrow = (
        predict_row(a_row(tmp_path, notes=notes, dtype=dtype), ZOO, CONSTANTS).prediction
        for notes, dtype in (("", "bf16"), ("DeepSpeed", "bf16"), ("DeepSpeed", "fp16"))
    )
    gradients = plain.peak_memory.gradient_bytes
    assert both.peak_memory.gradient_bytes == gradients * 3 // 2
    assert narrow.peak_memory.gradient_bytes == gradients // 2
    held, passing = (one.peak_memory.allocated_bytes for one in (both, plain))
    assert held - passing >= gradients // 2  # and a layer's gradient in 16 bits on its way
    # Megatron's products add to gradients of 32 bits; these are made in 16, cast, added and copied.
    assert both.step_seconds > plain.step_seconds


def test_a_pipeline_holds_its_activations_in_flight(tmp_path: Path) -> None:
    row = a_row(tmp_path, tp="1", pp="4", dp="1", global_batch="16")
    stages = predict_row(row, ZOO, CONSTANTS).prediction.stages
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]


def test_a_prediction_from_a_cached_trace_takes_less_than_20_milliseconds(tmp_path: Path) -> None:
    predict_row(a_row(tmp_path, tp="1", dp="4"), ZOO, CONSTANTS)
    rows = iter([a_row(tmp_path, tp="1", dp="4", global_batch=str(2**n)) for n in range(3, 8)])
    assert least_seconds(lambda: predict_row(next(rows), ZOO, CONSTANTS)) < 20e-3


def test_the_host_binds_where_the_device_is_quick() -> None:
    # 10 ops · 7 µs + 2 collectives · 70 µs = 0.21 ms is less than the device's 1 and 2 ms; with
    # checkpoints the host takes 1 + 0.21 ms forward, and 1.6 + 0.42 ms backward.
    work = CONSTANTS.host
    once = 10 * work.op_seconds + 2 * work.collective_seconds
    quiet = with_host(LAYER, work, ops=10, collectives=2, recompute=Recompute.NONE)
    assert quiet.forward_seconds == max(1e-3, once)
    busy = with_host(LAYER, work, ops=10, collectives=2, recompute=Recompute.FULL)
    assert busy.forward_seconds == pytest.approx(max(1e-3, once + work.checkpoint_forward_seconds))
    assert busy.backward_seconds == pytest.approx(
        max(2e-3, 2 * once + work.checkpoint_backward_seconds)
    )


@pytest.mark.parametrize(
    ("notes", "kind"),
    [
        ("peak_memory = max allocated GiB", MemoryKind.ALLOCATED),
        ("memory=nvidia-smi max over nodes", MemoryKind.DEVICE),
        ("memory=max over ranks GiB", MemoryKind.RESERVED),
    ],
)
def test_memory_is_compared_with_what_was_measured(
    tmp_path: Path, notes: str, kind: MemoryKind
) -> None:
    assert memory_kind(a_row(tmp_path, notes=notes)) is kind


def test_a_report_counts_what_was_predicted_and_what_not(tmp_path: Path) -> None:
    rows = (a_row(tmp_path), a_row(tmp_path, dtype="fp8"), a_row(tmp_path, peak_memory_gb="3"))
    outcomes, skipped = validate_rows(rows, ZOO, CONSTANTS)
    report = report_of(outcomes, skipped)
    assert (report.total.predicted, report.total.skipped) == (2, 1)
    assert report.total.memory is not None
    assert report.total.memory.count == 1
    assert [(one.reason, one.count) for one in report.reasons] == [("precision is not modelled", 1)]
