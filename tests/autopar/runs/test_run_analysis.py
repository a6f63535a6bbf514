"""A run beside its plan: medians of steady steps, and what is off by more than a quarter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.planner.errors import InputError
from autopar.planner.plan.files.document import read_plan, write_plan
from autopar.planner.plan.plan import Plan
from autopar.runs.run_metrics import Analysis, RunFigure, analyze, analyze_run
from tests.autopar.commands import Autopar
from tests.codegen.plans import pinned_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return pinned_plan("mnist.py", (), microbatch=4)


def line(seconds: float, **more: Any) -> dict[str, Any]:
    return {"step": 1, "loss": 1.0, "seconds": seconds, "unit": "samples", **more}


def analysis_of(plan: Plan, lines: Sequence[dict[str, Any]]) -> Analysis:
    found = analyze(plan, lines)
    assert found is not None
    return found


def figure(found: Analysis, name: str) -> RunFigure:
    return next(one for one in found.figures if one.name == name)


def test_the_first_line_of_each_start_is_left_out(plan: Plan) -> None:
    started = {"event": "started"}
    kept = {"event": "kept", "seconds": 3.0}
    lines = [started, line(9.0), line(1.0), kept, line(2.0), started, line(8.0), line(3.0)]
    found = analysis_of(plan, lines)
    assert (found.compared_steps, found.fastest_seconds, found.slowest_seconds) == (3, 1.0, 3.0)
    assert figure(found, "step").measured == 2.0
    assert figure(found, "samples a second").measured == 8 / 2.0  # rows of a step
    assert found.keeping_seconds == 3.0
    assert analysis_of(plan, [started, line(9.0)]).fastest_seconds == 9.0, "it is all there is"
    assert analyze(plan, [started]) is None


@pytest.mark.parametrize(
    ("share", "is_far"), [(1.0, False), (1.24, False), (1.26, True), (0.76, False), (0.74, True)]
)
def test_what_is_off_by_more_than_a_quarter_is_flagged(
    share: float, is_far: bool, plan: Plan
) -> None:
    seconds = plan.prediction.step_seconds * share
    found = figure(analysis_of(plan, [line(1.0), line(seconds)]), "step")
    assert found.is_far_off is is_far
    assert found.error == pytest.approx(share - 1)


def test_memory_and_mfu_are_compared_where_they_were_measured(plan: Plan) -> None:
    names = {one.name for one in analysis_of(plan, [line(1.0, mfu=None)]).figures}
    assert names == {"step", "samples a second"}
    lines = [line(1.0), line(1.0, mfu=0.2, memory_bytes=100), line(1.0, memory_bytes=300)]
    found = analysis_of(plan, lines)
    assert figure(found, "MFU").measured == 0.2
    memory = figure(found, "memory of the first rank")
    assert memory.measured == 300
    assert memory.predicted == plan.prediction.stages[0].memory.reserved_bytes


def test_the_folder_of_a_job_is_a_run(plan: Plan, tmp_path: Path) -> None:
    text = "".join(f"{json.dumps(line(seconds))}\n" for seconds in (9.0, 1.0))
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    write_plan(plan, tmp_path / "plan.json")
    stored = read_plan(tmp_path)
    found = analyze_run(stored, tmp_path).analysis
    assert found == analyze_run(stored, tmp_path / "metrics.jsonl").analysis
    with pytest.raises(InputError, match="used another plan"):
        analyze_run(replace(stored, objective="memory"), tmp_path)


def test_the_page_tells_figures_flags_and_what_to_do(
    autopar: Autopar, plan: Plan, tmp_path: Path
) -> None:
    path, metrics = tmp_path / "plan.json", tmp_path / "metrics.jsonl"
    write_plan(plan, path)
    slow = 2 * plan.prediction.step_seconds
    lines = [line(slow, against_plan=2.0), line(slow, against_plan=2.0)]
    metrics.write_text("\n".join(map(json.dumps, lines)))
    ran = autopar("explain", str(path), "--analyze", str(metrics))
    assert ran.code == 0
    step = next(one for one in ran.out.splitlines() if one.split()[:1] == ["step"])
    assert "+100%" in step
    assert "more than a quarter" in step
    assert "autopar profile" in ran.out
    metrics.write_text(json.dumps(line(slow, against_plan=None)))
    ran = autopar("explain", str(path), "--analyze", str(metrics))
    assert "but the run was on another device" in " ".join(ran.out.split())
    assert "autopar profile" not in ran.out
    folder = tmp_path / "run"
    write_plan(replace(plan, objective="cost"), folder / "plan.json")
    for given, told in ((folder, "used another plan"), (tmp_path / "no", "is no run")):
        ran = autopar("explain", str(path), "--analyze", str(given))
        assert (ran.code, told in ran.err) == (2, True)
