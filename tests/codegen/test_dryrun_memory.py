"""The memory that plans predict is what their scripts hold, on models of seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.proof.dryrun.running import DryRun, dry_run
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planning import make_plan
from tests.cells import cells

pytestmark = pytest.mark.usefixtures("forked_python", "traced_once")
MODEL = Path(__file__).parents[2] / "models_zoo" / "llama.py"
SHAPE = (
    "dim=256",
    "heads=4",
    "kv_heads=2",
    "ffn=768",
    "layers=4",
    "vocab_size=4096",
    "seq_len=512",
)


STAND = (
    ("dp=4,zero=2,microbatch=1", 8, 1, "bf16"),
    ("pp=4,schedule=interleaved-zero-bubble,microbatch=1", 8, 2, "bf16"),
    # One microbatch: gradients come while activations go.
    ("dp=2,tp=2,zero=1,microbatch=2", 4, 1, "bf16"),
)
MORE = (
    ("pp=2,tp=2,schedule=1f1b,microbatch=1", 3, 3, "bf16"),
    ("dp=2,tp=2,zero=3,microbatch=1", 8, 3, "fp16"),
    ("dp=4,zero=1,microbatch=1", 8, 1, "fp16"),
    ("dp=4,zero=2,microbatch=2", 8, 1, "bf16"),
    ("dp=4,zero=3,microbatch=1", 8, 0, "bf16"),
    ("pp=4,schedule=1f1b,microbatch=1", 8, 0, "fp16"),
    ("dp=4,zero=3,microbatch=2", 8, 0, "bf16"),
    ("dp=4,zero=0,microbatch=2", 8, 2, "fp32"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("pins", "batch", "rank", "precision"), cells((*STAND, *MORE), STAND))
def test_a_rank_holds_what_the_plan_says(pins: str, batch: int, rank: int, precision: str) -> None:
    assert error_of(pins, batch, rank, precision) == pytest.approx(0, abs=0.05)


EXPERTS = """
import torch
from torch import nn
from torch.nn import functional as F

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(256, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x):
        rows = x.reshape(-1, 256)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            made = made.index_add(0, row, expert(rows[row]) * weights[row, slot, None])
        return F.mse_loss(made.view_as(x), x)

def build_model():
    return Experts()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 128, 256)}
"""


def test_experts_in_a_loop_hold_what_the_plan_says(tmp_path: Path) -> None:
    path = tmp_path / "experts.py"
    path.write_text(EXPERTS)
    plan = make_plan(
        str(path),
        (),
        choose_cluster(1, "a100-80gb"),
        gathered_constraints((), {"global_batch": "64"}, None),
        time_limit_seconds=None,
    )
    found = dry_run(plan, tmp_path, rank=0)
    assert found.error == pytest.approx(0, abs=0.1)
    assert found.predicted_device_bytes == plan.prediction.peak_memory.device_bytes


CHUNKS = """
[[recompute]]
modules = "lm_head"
mode = "chunked"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "precision"),
    cells(
        (
            ("dp=4,zero=3,microbatch=2", "bf16"),
            ("dp=4,zero=1,microbatch=1", "bf16"),
            ("dp=4,zero=0,microbatch=2", "fp32"),
            ("pp=2,tp=2,schedule=1f1b,microbatch=1", "bf16"),
        ),
        (("dp=4,zero=3,microbatch=2", "bf16"), ("dp=4,zero=1,microbatch=1", "bf16")),
    ),
)
def test_a_loss_in_chunks_holds_what_the_plan_says(
    pins: str, precision: str, tmp_path: Path
) -> None:
    file = tmp_path / "constraints.toml"
    file.write_text(CHUNKS)
    found = error_of(pins, 8, 3, precision, constraints=file)
    assert found == pytest.approx(0, abs=0.03)


SAVED_THERE = """
[[recompute]]
modules = "layers.*"
mode = "host"
"""
SAVED_CELLS = (
    ("dp=4,zero=0,microbatch=2", 8, 0, "bf16"),
    ("dp=4,zero=0,microbatch=1", 8, 0, "fp32"),
    ("dp=4,zero=3,microbatch=1", 8, 1, "bf16"),
    ("tp=4,microbatch=4", 8, 0, "bf16"),
    ("pp=2,tp=2,schedule=1f1b,microbatch=1", 8, 0, "bf16"),
    ("pp=2,dp=2,schedule=1f1b,microbatch=1", 8, 3, "fp32"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "batch", "rank", "precision"), cells(SAVED_CELLS, SAVED_CELLS[1:3])
)
def test_layers_that_save_on_the_host_hold_what_the_plan_says(
    pins: str, batch: int, rank: int, precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved_there.toml"
    path.write_text(SAVED_THERE)
    found = rehearsed(pins, batch, rank, precision, path)
    # under ZeRO-3 small blocks are predicted too large, by 6 % where they are recomputed
    assert found.error == pytest.approx(0, abs=0.05 if "zero=3" in pins else 0.03)
    assert found.host_bytes == pytest.approx(found.predicted_host_bytes, rel=0.03)


def error_of(
    pins: str, batch: int, rank: int, precision: str, *, constraints: Path | None = None
) -> float:
    return rehearsed(pins, batch, rank, precision, constraints).error


def rehearsed(pins: str, batch: int, rank: int, precision: str, constraints: Path | None) -> DryRun:
    plan = make_plan(
        str(MODEL),
        SHAPE,
        choose_cluster(4, "a100-80gb"),
        gathered_constraints(
            [pins],
            {"global_batch": str(batch), "precision": precision, "compile": "none"},
            constraints,
        ),
        time_limit_seconds=None,
    )
    return dry_run(plan, MODEL.parent, rank=rank)


@pytest.mark.slow
def test_an_outer_optimizer_on_the_host_holds_what_the_plan_says(tmp_path: Path) -> None:
    path = tmp_path / "outer.toml"
    path.write_text('offload = "outer"\n[choices]\nsync_every = 8\nbucket_sizes = ["1 MiB"]\n')
    found = rehearsed("dp=4,zero=1,shard=2,microbatch=2", 8, 1, "fp32", path)
    assert found.error == pytest.approx(0, abs=0.03)
    assert found.host_bytes == pytest.approx(found.predicted_host_bytes, rel=0.03)


# gradients are more than a few buckets, as in any model that needs this
ON_HOST = """
offload = "optimizer"

[choices]
bucket_sizes = ["1 MiB"]
"""
HOST_CELLS = (
    ("dp=4,zero=1,microbatch=2", 8, 0, "fp32"),
    ("dp=4,zero=2,microbatch=2", 8, 0, "bf16"),
    ("dp=4,zero=1,microbatch=1", 8, 1, "bf16"),
    ("pp=2,dp=2,zero=1,microbatch=1", 8, 3, "bf16"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("pins", "batch", "rank", "precision"), cells(HOST_CELLS, HOST_CELLS[1:3]))
def test_device_and_host_hold_what_the_plan_says(
    pins: str, batch: int, rank: int, precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "on_host.toml"
    path.write_text(ON_HOST)
    found = rehearsed(pins, batch, rank, precision, path)
    assert found.error == pytest.approx(0, abs=0.03)
    # gradients that arrive to be added take less than predicted in a model this small
    more = found.predicted_host_bytes - found.host_bytes
    assert -4096 <= more <= 5 * 2**20
