"""Layouts, recomputation and practice from the words of a table, and rows that are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.costs.prediction import Zero
from benchmarks.validation.predict_row import layers_per_stage
from benchmarks.validation.settings import WHOLE_BUCKET, settings_of
from benchmarks.validation.skip import reason_to_skip
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


COMPILED = {"source": "pytorch/torchtitan", "torch_compile": "True"}


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
