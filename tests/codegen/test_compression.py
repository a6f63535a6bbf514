"""Scripts that compress gradients train as one process that plays all of their ranks does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from autopar.codegen.emit import write_script
from autopar.codegen.proof.dryrun.running import dry_run
from autopar.codegen.proof.verification import read_script_of, verify
from autopar.planner.costs.prediction import Zero
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Compression
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.plans import pinned_plan
from tests.codegen.test_resume import apart, checkpoints, exported, kept_in, trained

NEAR = 1e-9
KINDS: dict[str, dict[str, Any]] = {
    "dp": {"data": 2, "microbatch": 2},  # two microbatches
    "dp 4": {"data": 4},
    "uneven": {"data": 3},
    "zero-1": {"data": 2, "zero_levels": (Zero.OPTIMIZER,)},
    "copies": {"data": 4, "shard": 2, "zero_levels": (Zero.OPTIMIZER,)},
    "tp": {"data": 2, "tensor": 2, "split": ("ffn", "heads")},
    "tp+sp": {"data": 2, "tensor": 2, "split": ("ffn", "heads", "seq")},
    "pp": {"data": 2, "pipeline": 2},
    "pp zero-1": {"data": 2, "pipeline": 2, "zero_levels": (Zero.OPTIMIZER,)},
}
LOSSY = [one for one in Compression if one.keeps_lost]


def plan(kind: str, compression: Compression) -> Plan:
    pins = {"zero_levels": (Zero.NONE,), **KINDS[kind]}
    return pinned_plan("gpt2.py", ("layers=2", "dropout=0.0"), compression=(compression,), **pins)


@pytest.mark.parametrize(
    ("kind", "compression"),
    cells(
        [("copies", Compression.INT8), ("zero-1", Compression.POWERSGD)],
        [("copies", Compression.INT8)],
    ),
)
def test_a_training_that_compresses_goes_on_to_the_bit_and_under_other_plans(
    kind: str, compression: Compression, tmp_path: Path
) -> None:
    first = plan(kind, compression)
    every = ("--checkpoint-every", "2", *checkpoints(tmp_path))
    expected = trained(first, tmp_path, 4, *every)
    weights = load_file(exported(tmp_path))
    again = ("--resume", str(kept_in(tmp_path, 2)), "--checkpoint")
    assert trained(first, tmp_path, 4, *again, str(tmp_path / "same")) == expected[2:]
    assert apart(load_file(exported(tmp_path)), weights) == 0
    for other in (plan("tp", compression), plan("dp", Compression.NONE)):
        losses = trained(
            other, tmp_path, 4, *again, str(tmp_path / f"other {other.arrangement.tensor}")
        )
        assert losses[0] == pytest.approx(expected[2], rel=1e-5)  # of the same weights
        if not compression.is_low_rank:  # other steps of PowerSGD differ from whole gradients
            assert losses == pytest.approx(expected[2:], rel=1e-3)


SENT = {Zero.NONE: ("alltoall_base", "allgather_base"), Zero.OPTIMIZER: ("alltoall_base",)}


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    ("zero", "kinds"), cells(list(SENT.items()), [(Zero.NONE, SENT[Zero.NONE])])
)
def test_scripts_send_as_many_bytes_as_are_priced(
    zero: Zero, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """Sizes are multiples of 256, so that only ends of buckets are padded."""
    sizes = ("layers=1", "dim=256", "ffn=256", "vocab_size=256", "seq_len=64", "dropout=0.0")
    made = pinned_plan(
        "gpt2.py",
        sizes,
        data=4,
        compression=(Compression.INT8,),
        zero_levels=(zero,),
    )
    (priced,) = [one for one in made.prediction.communication if "gradients" in one.reason]
    found = dry_run(made, tmp_path, rank=1).collectives
    for kind in kinds:
        sent = sum(one["bytes"] * one["count"] for one in found if one["kind"] == kind)
        padding = 2 * 4 * 260  # each of two buckets ends with less than a block for each rank
        assert priced.payload_bytes <= sent < priced.payload_bytes + padding


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow
def test_16_bit_sums_are_compared_as_they_are_and_their_bound_is_told(tmp_path: Path) -> None:
    made = plan("dp", Compression.HALF)
    script = write_script(made, tmp_path)
    found = verify(made, tmp_path, read_script_of(made, script, tmp_path), steps=2)
    assert found.is_within(NEAR), found
    (note,) = found.notes
    assert "at most 0.8% of the sum of their sizes" in note  # two ranks round to 8 digits: 2 ÷ 2⁸
    rounded = compare(made, steps=2)
    assert not rounded.is_within(NEAR)
    assert rounded.gradient.largest < 2 / 2**8


EVERY = [(kind, one) for kind in KINDS for one in LOSSY]


@pytest.mark.parametrize(
    ("kind", "compression"),
    cells(EVERY, [("dp", Compression.INT8), ("tp+sp", Compression.POWERSGD)]),
)
def test_a_script_that_compresses_gradients_trains_as_one_process_that_does(
    kind: str, compression: Compression
) -> None:
    found = compare(plan(kind, compression))
    assert found.is_within(NEAR), found
