"""Layouts, recomputation and practice from the words of a table, and rows that are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.state import float8_parts
from autopar.planner.precision import Float8
from benchmarks.validation.practice import Attention
from benchmarks.validation.predict_row import layers_per_stage
from benchmarks.validation.settings import WHOLE_BUCKET, settings_of
from benchmarks.validation.skip import reason_to_skip
from benchmarks.validation.table import stated
from tests.benchmarks.validation.rows import a_row


@pytest.mark.parametrize(
    ("fsdp", "zero"),
    [
        ("none (DDP)", Zero.NONE),
        ("ZeRO-0", Zero.NONE),
        ("ZeRO-1", Zero.OPTIMIZER),
        ("distributed optimizer (ZeRO-1)", Zero.OPTIMIZER),
        ("SHARD_GRAD_OP (zero2)", Zero.GRADIENTS),
        ("FULL_SHARD (zero3)", Zero.PARAMETERS),
        ("FSDP2 full shard", Zero.PARAMETERS),
    ],
)
def test_the_sharding_column_names_a_level(tmp_path: Path, fsdp: str, zero: Zero) -> None:
    assert settings_of(a_row(tmp_path, fsdp=fsdp)).arrangement.zero is zero


def test_a_group_of_shards_is_smaller_than_the_data_ranks(tmp_path: Path) -> None:
    row = a_row(tmp_path, fsdp="FSDP group 2", gpus="8", gpus_per_node="8", dp="4")
    assert settings_of(row).arrangement.shard == 2


def test_microbatches_are_what_the_batch_leaves_each_data_rank(tmp_path: Path) -> None:
    assert settings_of(a_row(tmp_path)).arrangement.microbatches == 2  # 8 ÷ (2 · 2)


@pytest.mark.parametrize(
    ("fsdp", "notes", "overlaps"),
    [
        ("none (DDP)", "", False),
        ("ZeRO-1", "", False),
        ("FULL_SHARD", "", True),
        ("distributed optimizer", "", True),
        ("distributed optimizer", "no comm overlap", False),
        ("none (DDP)", "overlap-grad-reduce", True),
    ],
)
def test_gradients_are_reduced_by_the_bucket_where_practice_has_it(
    tmp_path: Path, fsdp: str, notes: str, overlaps: bool
) -> None:
    found = settings_of(a_row(tmp_path, fsdp=fsdp, notes=notes)).arrangement
    assert (found.bucket_bytes < WHOLE_BUCKET) is overlaps


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({}, Attention.FUSED),
        ({"model_family": "gpt(mpt)"}, Attention.BIASED),
        ({"flash_attention": "False"}, Attention.UNFUSED),
        (
            {"flash_attention": "False", "recompute": "selective (attention core)"},
            Attention.UNFUSED_AGAIN,
        ),
    ],
)
def test_kernels_of_attention(
    tmp_path: Path, changes: dict[str, str], attention: Attention
) -> None:
    assert settings_of(a_row(tmp_path, **changes)).practice.attention is attention


def test_several_stages_per_rank_run_interleaved(tmp_path: Path) -> None:
    row = a_row(tmp_path, pp="2", dp="1", vpp="2")
    found = settings_of(row).arrangement
    assert (found.schedule, found.stages_per_rank) == (ScheduleKind.INTERLEAVED_1F1B, 2)


COMPILED = {"source": "pytorch/torchtitan", "torch_compile": "True"}


@pytest.mark.parametrize(
    ("changes", "float8"),
    [
        ({}, Float8.NONE),
        ({"dtype": "fp8"}, Float8.TENSORWISE),
        ({"dtype": "fp8", "notes": "quantization float8 rowwise"}, Float8.ROWWISE),
        ({"dtype": "mxfp8", "notes": "mxfp8_cublas_rceil"}, Float8.MXFP8),
    ],
)
def test_float8_has_one_scale_a_tensor_unless_the_text_says_rowwise(
    tmp_path: Path, changes: dict[str, str], float8: Float8
) -> None:
    assert settings_of(a_row(tmp_path, **COMPILED, **changes)).practice.float8 is float8


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_weights_are_gathered_in_float8_where_the_text_says_so(tmp_path: Path, scales: str) -> None:
    for gathered, gathers in (("float8 all-gather", scales == "tensorwise"), ("", False)):
        notes = f"{scales}, {gathered}"
        row = a_row(tmp_path, **COMPILED, dtype="fp8", fsdp="FULL_SHARD", notes=notes)
        assert bool(float8_parts(settings_of(row).arrangement)) is gathers


def test_a_global_batch_that_is_not_stated_is_a_microbatch_of_each_data_rank(
    tmp_path: Path,
) -> None:
    row = a_row(tmp_path, global_batch="")
    assert row.global_batch == stated(row.dp) * stated(row.micro_batch)
    assert reason_to_skip(a_row(tmp_path, global_batch="", pp="2", dp="1")) != ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"micro_batch": ""}, "not stated: micro_batch"),
        ({"iteration_time_s": ""}, "no time or throughput"),
        ({"dtype": "fp8"}, "precision is not modelled"),
        ({"dtype": "fp8", **COMPILED}, ""),
        ({"dtype": "fp8", **COMPILED, "torch_compile": "False"}, "precision is not modelled"),
        ({"dtype": "fp8", **COMPILED, "notes": "rowwise_with_gw_hp"}, "precision is not modelled"),
        ({"dtype": "mxfp8", **COMPILED}, ""),
        ({"dtype": "mxfp8"}, "precision is not modelled"),
        ({"experts": "8"}, "experts, state spaces and latent attention are not modelled"),
        (
            {"model_family": "mixtral"},
            "experts, state spaces and latent attention are not modelled",
        ),
        ({"notes": "LoRA fine-tuning"}, "adapters (LoRA) are not modelled"),
        ({"notes": "WARNING: typo in the source"}, "its own notes doubt it"),
        ({"cp": "2", "dp": "1"}, "context parallelism is not modelled"),
        ({"model_family": "resnet"}, "the model's family is not in the zoo"),
        ({"global_batch": "9"}, "global batch is no multiple of data ranks and microbatch"),
        ({"recompute": "now and then"}, "recompute 'now and then' is not modelled"),
        ({"layers": "1", "pp": "2", "dp": "1"}, "fewer layers than stages"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    assert reason_to_skip(a_row(tmp_path, **changes)) == reason


def test_layers_that_do_not_divide_go_to_the_middle() -> None:
    assert layers_per_stage(70, 12) == (5, *[6] * 10, 5)
    assert layers_per_stage(8, 4) == (2, 2, 2, 2)
