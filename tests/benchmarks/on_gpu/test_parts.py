"""Parts of the benchmark run on a CPU, and find there what they are to find on a GPU."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.on_gpu import ops as ops_part
from benchmarks.on_gpu.planned import planned
from benchmarks.on_gpu.ranks.norms import norm_rows
from benchmarks.on_gpu.ranks.recomputation import recomputation_rows
from benchmarks.on_gpu.ranks.transport import transport_rows
from benchmarks.on_gpu.sides import Job, taken
from benchmarks.on_gpu.steps import TINY, _predicted_rows, _side_row, _term_row
from tests.benchmarks.on_gpu.here import Here


def test_every_message_brings_back_what_was_sent() -> None:
    found = {row.cells["message"]: row.cells["found"] for row in transport_rows(Here())}
    assert set(found.values()) == {"as sent"}
    assert {"exchanged_pieces", "collectives.gather", "all_gather_object"} <= set(found)


def test_recomputed_layers_have_the_same_gradients() -> None:
    rows = list(recomputation_rows(Here()))
    assert {(row.cells["mode"], row.cells["called"]) for row in rows} == {
        ("full", "by position"),
        ("full", "by keyword"),
        ("selective", "by position"),
        ("selective", "by keyword"),
    }
    assert {row.cells["found"] for row in rows} == {"equal"}


def test_norms_over_ranks_are_the_norm_of_one() -> None:
    for row in norm_rows(Here()):
        apart = row.cells["_Normalise: apart"]
        assert isinstance(apart, float)
        assert apart < (0.01 if row.cells["type"] == "bfloat16" else 1e-5)


@pytest.mark.slow
def test_script_and_plain_training_do_the_same_and_are_told_beside_a_prediction(
    tmp_path: Path,
) -> None:
    (case,) = TINY
    found = planned(case, "cpu", str(tmp_path))
    job = Job(
        script=tmp_path / "train.py",
        spec=case.spec,
        arguments=case.arguments,
        rows=case.rows,
        seconds=0.1,
    )
    here = Here()
    script, plain = here.fresh(taken, "script", job), here.fresh(taken, "plain", job)
    assert plain.loss == pytest.approx(script.loss, rel=1e-3)
    assert _side_row(case, "plain", plain, script).cells["note"] == ""
    ops_seconds = sum(found.seconds_by_kind.values())
    compute = next(one.seconds for one in found.terms if one.name == "compute")
    assert ops_seconds == pytest.approx(compute, rel=0.05)
    cells = _term_row(case, found, script).cells
    assert cells["measured, ms"] == 1e3 * script.step_seconds
    (row,) = _predicted_rows(case, found, script, "formulas")
    assert row.cells["predicted"] == 1e3 * found.step_seconds


def test_kernels_are_timed() -> None:
    with patch.object(ops_part, "GROUPS", {"losses": ops_part.GROUPS["losses"]}):
        rows = list(ops_part.ops(Here()))
    assert len(rows) == 4
    assert all("GB/s" in row.cells for row in rows)
