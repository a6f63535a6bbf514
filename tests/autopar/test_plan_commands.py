"""`autopar plan`, `explain` and `diff` through the command line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autopar.pages.plan_page import plan_page
from autopar.planner.costs.prediction import Zero
from autopar.planner.errors import ExitCode
from autopar.planner.plan.files.document import read_plan, write_plan
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.timeline import timeline_of
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile
from tests.autopar.commands import Autopar
from tests.planner.plan.plans import (
    arrangement,
    proof,
    runner_up,
    small_plan,
    split_plan,
    without_graph,
)
from tests.planner.subjects import ZOO

MNIST = str(ZOO / "mnist.py")


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the search by one that writes down what it was asked, and finds a small plan."""
    asked: list[dict[str, Any]] = []

    def search(
        *arguments: Any,
        report: Callable[[str], None],
        time_limit_seconds: float,
        measured: MeasuredFile | None,
        **_: object,
    ) -> Plan:
        graph, _, _, model, cluster, demands = arguments
        asked.append({"graph": graph, "model": model, "cluster": cluster, "demands": demands})
        asked[-1]["time_limit_seconds"] = time_limit_seconds
        asked[-1]["measured"] = measured
        report("searching")
        return replace(small_plan(), model=model)

    monkeypatch.setattr("autopar.planner.plan.fleet.search", search)
    monkeypatch.setattr("autopar.planner.plan.planned.fewer_as_fast", lambda *_, **__: None)
    monkeypatch.setattr("autopar.notes.note_compiling", lambda *_: None)  # of another model
    return asked


def test_plan_writes_the_plan_and_prints_the_table(
    autopar: Autopar, searched: list[dict[str, Any]]
) -> None:
    ran = autopar(
        "plan", MNIST, "--gpus", "8", "--device", "a100", "--global-batch", "64", "--pin", "dp=4",
        "--max-tp", "2", "--memory", "90%", "--precision", "fp32", "-o", "out",
        "--time-limit", "30",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert read_plan(Path("out")) == without_graph(
        replace(small_plan(), model=searched[0]["model"])
    )
    assert "dp 2" in ran.out
    assert "Written: out/plan.json" in ran.out
    (asked,) = searched
    demands = asked["demands"]
    assert (demands.data, demands.max_tensor, demands.global_batch) == (4, 2, 64)
    assert demands.precision is Precision.FP32
    assert asked["cluster"].size == 8
    assert asked["time_limit_seconds"] == 30
    assert asked["model"].spec == MNIST
    assert asked["model"].has_loss


def test_plan_prints_json_for_programs(autopar: Autopar, searched: list[dict[str, Any]]) -> None:
    ran = autopar("plan", MNIST, "--gpus", "2", "--json")
    assert searched
    assert json.loads(ran.out)["arrangement"]["data"] == 2


@pytest.mark.parametrize(
    ("options", "code", "telling"),
    [
        ((), 2, "no machines are given"),
        (("--gpus", "0"), 2, "0 is not a number of devices"),
        (("--gpus", "8.5"), 2, "'8.5' is not a number of devices"),
        (("--gpus", "8", "--nodes", "two"), 2, "'two' is not a number"),
        (("--gpus", "1000000000"), 2, "from 1 to 262144"),
        (("--device", "a100", "--cluster", "c.toml"), 2, "leave one of them out"),
        (("--gpus", "1..", "--device", "a100"), 2, "'1..' is not a number of devices"),
        (("--gpus", "8..1", "--device", "a100"), 2, "from 8 to 1 fills whole nodes"),
        (("--gpus", "9..15", "--device", "a100"), 2, "from 9 to 15 fills whole nodes"),
        (("--gpus", "8,12", "--device", "a100"), 2, "12 devices do not fill nodes of 8"),
        (("--gpus", "1..1024", "--device", "a100"), 2, "135 numbers of devices to plan for"),
        (("--gpus", "2,4", "--pin", "tp=3"), 3, "tp=3 (--pin)"),
        (("--gpus", "8", "--tolerance", "3"), 2, "'3' is not a share of the step"),
        (
            ("--gpus", "8", "--deadline", "24h"),
            2,
            "a deadline of 24h is given, but the length of",
        ),
        (("--gpus", "8", "--budget", "500"), 2, "--tokens 10B, or --samples 1M"),
        (("--gpus", "8", "--deadline", "24", "--samples", "9"), 2, "'24' cannot be read"),
        (("--gpus", "8", "--tokens", "9", "--samples", "9"), 2, "both say how much"),
        (("--gpus", "8", "--tokens", "1B"), 2, "rows are no sequences of tokens"),
        (("--gpus", "8", "--samples", "0"), 2, "'0' cannot be read"),
        (("--gpus", "8", "--pin", "tp=3"), 3, "legal are pp=1,dp=2,tp=4"),
        (
            ("--gpus", "8", "--pin", "dp=2,tp=2,pp=1"),
            3,
            "dp=2 (--pin), tp=2 (--pin) and pp=1 (--pin)",
        ),
        (("--gpus", "8", "--pin", "dp=8", "--global-batch", "7"), 3, "a global batch of 7"),
        (("--gpus", "8", "--time-limit", "nan"), 2, "is out of range"),
        (("--gpus", "8", "-c", "rules.toml"), 2, "did you mean 'hidden.0'"),
    ],
)
def test_what_cannot_be_planned_is_one_message_and_a_code(
    autopar: Autopar,
    searched: list[dict[str, Any]],
    options: tuple[str, ...],
    code: int,
    telling: str,
) -> None:
    Path("rules.toml").write_text('[[recompute]]\nmodules = "hiden.0"\nmode = "full"\n')
    ran = autopar("plan", MNIST, *options)
    assert ran.code == code
    assert telling in " ".join(ran.err.split())
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert not searched
    assert not Path("plan.json").exists()


def test_a_foreign_file_is_not_written_over(
    autopar: Autopar, searched: list[dict[str, Any]]
) -> None:
    Path("plan.json").write_text('{"mine": 1}')
    ran = autopar("plan", MNIST, "--gpus", "2")
    assert ran.code == 2
    assert "is in the way" in ran.err
    assert Path("plan.json").read_text() == '{"mine": 1}'
    write_plan(small_plan(), Path("plan.json"))
    assert autopar("plan", MNIST, "--gpus", "2").code == 0
    assert len(searched) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_plans_fits_and_has_no_colour(width: int) -> None:
    big = arrangement(
        pipeline=16, data=128, tensor=8, zero=Zero.PARAMETERS, microbatches=256, stages_per_rank=2
    )
    plan = small_plan(runners_up=(runner_up(), runner_up(arrangement=big, recompute="full 20/126")))
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    for part in plan_page(plan):
        console.print(part)
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text
    for telling in ("step", "samples/s", "MFU", "memory", "splits every layer", "ZeRO-3"):
        assert telling in " ".join(text.split())
    assert "120 arrangements" in text


@pytest.fixture
def plans(tmp_path: Path) -> tuple[Path, Path]:
    """Write two plans of one model."""
    paths = (tmp_path / "a.json", tmp_path / "b.json")
    write_plan(small_plan("gpt2.py", pipeline=2), paths[0])
    split = split_plan()
    write_plan(replace(split, machines=replace(split.machines, content_hash="d" * 64)), paths[1])
    return paths


@pytest.mark.parametrize(
    ("options", "telling", "missing"),
    [
        (
            (),
            (
                "compute + recompute take 70% of",
                "critical",
                "together",
                "all-reduce",
                "No better plan",
            ),
            (),
        ),
        (
            ("--memory",),
            ("0 parameters", "1 parameters", "together"),
            ("all-reduce", "Where the step goes"),
        ),
        (("--comm",), ("data parallel gradients",), ("together",)),
        (("--stage", "1"), ("full", "together"), ("critical", "No better plan")),
        (("--why-not", "tp=2,pp=1"), ("Why not tp=2, pp=1?", "communication decides"), ()),
        (("--why-not", "tp=3"), ("no plan satisfies tp=3",), ()),
    ],
)
def test_explain_tells_what_is_asked(
    autopar: Autopar,
    plans: tuple[Path, Path],
    options: tuple[str, ...],
    telling: tuple[str, ...],
    missing: tuple[str, ...],
) -> None:
    ran = autopar("explain", str(plans[0]), *options)
    assert (ran.code, ran.err) == (0, "")
    told = " ".join(ran.out.split())
    assert all(one in told for one in telling)
    assert not any(one in told for one in missing)
    assert "\x1b" not in ran.out


def test_explain_names_axes_as_people_do(autopar: Autopar, plans: tuple[Path, Path]) -> None:
    ran = autopar("explain", str(plans[1]), "--comm")
    assert "split along ffn" in ran.out
    assert "partial sums" in ran.out


def test_layouts_that_do_not_fit_are_told(autopar: Autopar, tmp_path: Path) -> None:
    plan = small_plan("gpt2.py")
    write_plan(replace(plan, layouts=plan.layouts[::-1]), tmp_path / "a.json")
    ran = autopar("explain", "a.json")
    assert ran.code == 2
    assert "layouts.0" in ran.err


def test_diff_tells_what_moved_and_warns(autopar: Autopar, plans: tuple[Path, Path]) -> None:
    ran = autopar("diff", *map(str, plans))
    assert (ran.code, ran.err) == (0, "")
    for telling in ("the machines differ", "pipeline (pp)", "split along ffn", "throughput"):
        assert telling in ran.out
    same = autopar("diff", str(plans[0]), str(plans[0]))
    assert "warning" not in same.out
    assert json.loads(autopar("diff", *map(str, plans), "--json").out)["changes"]


def test_an_unfinished_search_says_so() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    for part in plan_page(small_plan(proof=proof(gap=0.1, is_complete=False))):
        console.print(part)
    assert "the time limit came first" in " ".join(console.export_text().split())


def test_explain_draws_the_schedule_in_80_columns(autopar: Autopar, tmp_path: Path) -> None:
    plan = small_plan(pipeline=2)
    write_plan(plan, tmp_path / "plan.json")
    ran = autopar("explain", str(tmp_path / "plan.json"), "--timeline")
    head, words, *ranks = ran.out.splitlines()
    assert head.startswith("1f1b, 4 microbatches; ")
    assert words.startswith("F forward, B backward, · waits")
    drawn = [line.split(maxsplit=2)[2] for line in ranks if line]
    assert [len(line) for line in drawn] == [70, 70]
    assert max(map(len, ran.out.splitlines())) <= 80
    assert drawn[0].startswith("F")
    assert drawn[1].startswith("·")  # the second rank waits for the first forward
    column_seconds = timeline_of(plan).pipeline_seconds / 70
    for line in drawn:  # 4 microbatches, whose ends are rounded to columns
        for letter, seconds in (("f", 0.001), ("b", 0.002)):
            assert line.lower().count(letter) == pytest.approx(4 * seconds / column_seconds, abs=4)


def test_a_trace_has_every_action_of_each_rank_one_after_the_other(
    autopar: Autopar, tmp_path: Path
) -> None:
    plan = small_plan(pipeline=2)
    write_plan(plan, tmp_path / "plan.json")
    for _ in range(2):  # its own file may be replaced
        assert autopar("trace", str(tmp_path), "-o", str(tmp_path / "trace.json")).code == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    actions = timeline_of(plan).actions
    shown = [one for one in events if one["ph"] == "X"]
    assert len(shown) == len(actions)
    names = {one["args"]["name"] for one in events if one["ph"] == "M"}
    assert names == {"predicted", "rank 0", "rank 1"}
    for one, action in zip(shown, actions, strict=True):
        assert (one["tid"], one["args"]["stage"]) == (action.rank, action.stage)
        assert one["ts"] == pytest.approx(action.start_seconds * 1e6, abs=0.01)
    for rank in range(2):
        own = [one for one in shown if one["tid"] == rank]
        assert all(one["ts"] + one["dur"] <= later["ts"] + 1e-6 for one, later in pairwise(own))
    (other := tmp_path / "mine.json").write_text("{}")
    assert autopar("trace", str(tmp_path), "-o", str(other)).code == ExitCode.USAGE
    assert other.read_text() == "{}"


def test_a_trace_has_the_step_that_a_run_profiled_beside_the_plan(
    autopar: Autopar, tmp_path: Path
) -> None:
    plan = small_plan(pipeline=2)
    write_plan(plan, tmp_path / "plan.json")
    run = tmp_path / "run"
    assert "there is no profile in" in autopar("trace", str(tmp_path), str(run)).err
    for rank in range(2):
        action = {"part": 0, "kind": "F", "microbatch": 3, "start_seconds": 0.5, "end_seconds": 0.6}
        told = {"pipeline_rank": rank, "begun_ns": 5_000_000_000, "actions": [action]}
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 1_500_000.0, "dur": 2}
        before = {**kernel, "name": "early", "ts": 10.0}
        trace = {"baseTimeNanoseconds": 4_000_000_000, "traceEvents": [kernel, before, {"ph": "M"}]}
        folder = run / "profile" / "20"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
        with gzip.open(folder / f"rank-{rank}.trace.json.gz", "wt") as file:
            json.dump(trace, file)
    ran = autopar("trace", str(tmp_path), str(run), "-o", str(tmp_path / "trace.json"))
    assert ran.code == 0, ran.err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {
        0: "predicted",
        1: "measured in step 20",
        2: "rank 0, kernels",
        3: "rank 1, kernels",
    }
    measured = [one for one in events if one["pid"] == 1 and one["ph"] == "X"]
    assert [(one["name"], one["tid"], one["ts"], one["dur"]) for one in measured] == [
        ("forward 3", rank, 500_000.0, 100_000.0) for rank in range(2)
    ]
    kernels = [one for one in events if one["pid"] > 1 and one["ph"] == "X"]
    assert [(one["name"], one["ts"]) for one in kernels] == [("gemm", 500_000.0)] * 2
