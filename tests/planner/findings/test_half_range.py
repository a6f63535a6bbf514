"""What fp16 cannot hold is refused before a training loses itself in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.kernels.rates import rates_of
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.precision import Precision
from autopar.planning import make_plan

MASKED = """
import torch
from torch import nn
from torch.nn import functional as F

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).masked_fill(x > 0, -1e9)

def build_model():
    return Masked()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 8), "labels": torch.zeros(batch_size, dtype=torch.long)}

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"])
"""
UNMASKED = MASKED.replace("-1e9", '-float("inf")')
# A loss function takes outputs in float32; a loss that the model itself returns does not.
INSIDE = (
    UNMASKED.partition("def loss")[0]
    .replace("def forward(self, x):", "def forward(self, x, labels):")
    .replace("return self.inner(x)", "x = self.inner(x)\n        return F.cross_entropy(x")
    .replace('.masked_fill(x > 0, -float("inf"))', ", labels)")
)
ROWS, GREATEST = 70_000, 65_504  # the latter is what fp16 ends at


def planned(folder: Path, text: str, precision: Precision, rows: int = ROWS) -> Arrangement:
    (folder / "masked.py").write_text(text)
    plan = make_plan(
        str(folder / "masked.py"),
        (),
        choose_cluster(2, "cpu"),
        Constraints(precision=precision, global_batch=2 * rows, data=2, microbatch=rows),
        time_limit_seconds=None,
    )
    return plan.arrangement


def test_a_mask_beyond_fp16_is_refused_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="-1e\\+09 does not fit fp16") as refusal:
        planned(tmp_path, MASKED, Precision.FP16)
    assert "masked.py:12" in str(refusal.value)


def test_a_mean_over_more_targets_than_fp16_counts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mean over 70,000 targets"):
        planned(tmp_path, INSIDE, Precision.FP16)


@pytest.mark.parametrize(
    ("text", "precision", "rows"),
    [
        (MASKED, Precision.BF16, ROWS),
        (UNMASKED, Precision.FP16, ROWS),
        (INSIDE.replace("entropy(x", "entropy(x.float()"), Precision.FP16, ROWS),
        (INSIDE, Precision.FP16, GREATEST),
        (MASKED.replace("-1e9", f"-{GREATEST}.0"), Precision.FP16, 8),
    ],
)
def test_what_fits_is_planned(text: str, precision: Precision, rows: int, tmp_path: Path) -> None:
    found = planned(tmp_path, text, precision, rows)
    assert (found.precision, found.microbatch) == (precision, rows)


@pytest.mark.parametrize(
    ("text", "rows"), [(INSIDE, GREATEST + 1), (MASKED.replace("-1e9", f"-{GREATEST + 1}.0"), 8)]
)
def test_what_is_larger_by_one_is_refused(text: str, rows: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"65,505 targets|-65505 does not fit"):
        planned(tmp_path, text, Precision.FP16, rows)


def test_devices_without_bf16_units_have_rates_in_fp16() -> None:
    device = choose_cluster(1, "v100").nodes[0].device
    assert rates_of(device, Precision.FP16).own.peak_flops_per_second == 125e12
    with pytest.raises(InputError, match="no bf16 units"):
        rates_of(device, Precision.BF16)
