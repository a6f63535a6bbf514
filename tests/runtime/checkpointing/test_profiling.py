"""A step under the profiler: how long each rank computes, beside the plan."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.codegen.emit import write_script
from autopar.codegen.proof.script_rank import imported
from autopar.planner.costs.schedules.orders import ActionKind
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.timeline import MeasuredStep, measured_step, timeline_of
from autopar.runs.run_metrics import RunFigure, analyze, lines_of
from autopar.runtime.checkpointing.signals import covered_us
from autopar.runtime.ranks.metrics import PROFILES
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


def analyze_of(plan: Plan, metrics: Path) -> tuple[RunFigure, ...]:
    found = analyze(plan, lines_of(metrics))
    assert found is not None
    return found.ranks


def test_each_pipeline_rank_is_set_beside_the_plan(tmp_path: Path) -> None:
    plan, metrics = plan_of("pp"), tmp_path / "metrics.jsonl"
    run_on_ranks(run_script, 2, str(write_script(plan, tmp_path)), str(metrics))
    found = analyze(plan, lines_of(metrics))
    assert found is not None
    assert found.profiled_step == 3
    names = [one.name for one in found.ranks]
    each = [f"pipeline rank {{}}: {what}" for what in ("computing", "messages and waiting")]
    each += ["stage {}: forward", "stage {}: backward"]
    assert names == [what.format(rank) for rank in range(2) for what in each]
    assert all(one.measured > 0 for one in found.ranks)
    for computing, rest in zip(found.ranks[::4], found.ranks[1::4], strict=True):
        step = plan.prediction.step_seconds
        assert abs(computing.predicted + rest.predicted - step) < 1e-12
    assert_actions_are_the_plans(plan, measured_step(plan, tmp_path / PROFILES))


def assert_actions_are_the_plans(plan: Plan, measured: MeasuredStep) -> None:
    """Assert that each rank ran the predicted actions, one after another, in their order."""
    assert measured.step == 3
    for rank in range(plan.arrangement.pipeline):
        own = [one for one in measured.actions if one.rank == rank]
        planned = [one for one in timeline_of(plan).actions if one.rank == rank]
        planned = [one for one in planned if one.kind is not ActionKind.WEIGHT_GRADIENT]
        assert [(a.stage, a.kind, a.microbatch) for a in own] == [
            (a.stage, a.kind, a.microbatch) for a in planned
        ]
        assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(own))
        spans = [one for one in measured.kernels if one.get("dur") and one["pid"] == rank + 2]
        (first, last) = (own[0].start_seconds * 1e6, own[-1].end_seconds * 1e6)
        inside = [one for one in spans if first - 1e3 <= float(str(one["ts"])) <= last + 1e3]
        assert len(inside) > len(own), "both have one clock"


@pytest.mark.more_cells
@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble_v", "tp_zero3"])
def test_each_kind_of_step_has_the_plans_actions(kind: str, tmp_path: Path) -> None:
    plan, ranks = plan_of(kind), plan_of(kind).arrangement.ranks
    run_on_ranks(run_script, ranks, str(write_script(plan, tmp_path)), str(tmp_path / "metrics"))
    assert_actions_are_the_plans(plan, measured_step(plan, tmp_path / PROFILES))


def test_a_step_without_a_pipeline_has_its_actions_too(tmp_path: Path) -> None:
    plan, metrics = plan_of("zero3", "layers=1"), tmp_path / "metrics.jsonl"
    run_on_ranks(run_script, 2, str(write_script(plan, tmp_path)), str(metrics))
    assert_actions_are_the_plans(plan, measured_step(plan, tmp_path / PROFILES))
    (computing, waiting, forward, backward) = analyze_of(plan, metrics)
    assert (forward.name, backward.name) == ("a microbatch: forward", "a microbatch: backward")
    assert 0 < forward.measured + backward.measured <= computing.measured + waiting.measured


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("rank-0.json", "{}", "was damaged or changed by hand"),
        ("rank-0.trace.json.gz", "no gzip", "trace cannot be read"),
        (None, "", "there is no profile"),
    ],
)
def test_a_damaged_profile_is_told(tmp_path: Path, name: str | None, text: str, told: str) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    if name is not None:
        good = {"pipeline_rank": 0, "begun_ns": 1, "actions": []}
        (folder / "rank-0.json").write_text(json.dumps(good), encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=told):
        measured_step(plan_of("pp"), tmp_path)


def test_a_profile_outside_of_the_folder_of_a_step_is_none(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="there is no profile"):
        measured_step(plan_of("pp"), tmp_path)
