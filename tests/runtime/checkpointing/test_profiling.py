"""A step under the profiler: how long each rank computes, beside the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autopar.codegen.emit import write_script
from autopar.codegen.proof.script_rank import imported
from autopar.runs.run_metrics import analyze, lines_of
from autopar.runtime.checkpointing.signals import covered_us
from tests.codegen.kinds import plan_of
from tests.runtime.processes import run_on_ranks

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12)


@given(SPANS)
def test_spans_cover_each_moment_once(spans: list[tuple[int, int]]) -> None:
    moments = {at for start, length in spans for at in range(start, start + length)}
    assert covered_us((start, start + length) for start, length in spans) == len(moments)


def run_script(path: str, metrics: str) -> None:
    script: Any = imported(Path(path))
    script.main(["--steps", "4", "--profile-step", "3", "--metrics", metrics, "--export", "none"])


def test_each_pipeline_rank_is_set_beside_the_plan(tmp_path: Path) -> None:
    plan, metrics = plan_of("pp"), tmp_path / "metrics.jsonl"
    run_on_ranks(run_script, 2, str(write_script(plan, tmp_path)), str(metrics))
    found = analyze(plan, lines_of(metrics))
    assert found is not None
    assert found.profiled_step == 3
    names = [one.name for one in found.ranks]
    each = ("computing", "messages and waiting")
    assert names == [f"pipeline rank {rank}: {what}" for rank in range(2) for what in each]
    assert all(one.measured > 0 for one in found.ranks)
    for computing, rest in zip(found.ranks[::2], found.ranks[1::2], strict=True):
        step = plan.prediction.step_seconds
        assert abs(computing.predicted + rest.predicted - step) < 1e-12
